"""Appends text to a trie's pages, and evicts pages.

For each token, the hashes of the last 2, 4, 8 and 16 tokens lead to the newest place of that
context. Each place leads to the context's previous one.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from specserve.core.compile import inner, kernel
from specserve.trie.contexts import (
    LENGTHS,
    LONGEST,
    NUM_LEVELS,
    hash_page_contexts,
    prefetch_context,
    put_place,
    replace_place,
)
from specserve.trie.layout import (
    CUT,
    FLAGS,
    GENERATION,
    HAND,
    HEAD,
    IS_OPEN,
    LENGTH,
    NEXT,
    NEXT_FLAGS,
    NUM_EVICTED,
    NUM_FREE_PAGES,
    NUM_FREE_SLOTS,
    NUM_INGESTED,
    NUM_TOKENS,
    OWNER,
    PAGE,
    PREV,
    TAIL,
)

_SCAN_PAGES = 32

_POSITION, _NUM_LEVELS = NUM_LEVELS, NUM_LEVELS + 1
"""Columns of ``Scratch.waiting`` after the hashes: the token's position, its number of contexts."""


class Scratch(NamedTuple):
    """Work arrays of the kernels that append and free pages.

    Attributes:
        waiting: uint64 ``[PAGE, levels + 2]``, contexts that are not in the tables yet. All their
            buckets are prefetched before the first context is inserted.
        prefix: uint64 ``[1 + LONGEST + PAGE]``, rolling hashes.
    """

    waiting: npt.NDArray[np.uint64]
    prefix: npt.NDArray[np.uint64]

    @classmethod
    def empty(cls) -> Self:
        """Arrays of zeros."""
        return cls(
            np.zeros((PAGE, NUM_LEVELS + 2), np.uint64), np.zeros(1 + LONGEST + PAGE, np.uint64)
        )


@inner
def open_slot(a, sequence):  # type: ignore[no-untyped-def]
    """Slot of the open sequence with this number; -1 if it was closed or cleared."""
    slot = sequence & 0xFFFFFFFF
    if sequence < 0 or a.slots[slot, GENERATION] != sequence >> 32 or not a.slots[slot, IS_OPEN]:
        return -1
    return slot


@inner
def _free_slot(a, slot):  # type: ignore[no-untyped-def]
    a.free_slots[a.scalars[NUM_FREE_SLOTS]] = slot
    a.scalars[NUM_FREE_SLOTS] += 1


@inner
def _ends(level, known, end, from_before):  # type: ignore[no-untyped-def]
    """Offsets of the ends of a level's contexts in a page, see :func:`_unlink`: from, to."""
    stop = min(end, LENGTHS[level] - 1) if from_before else end
    return max(LENGTHS[level] - known - 1, 0), stop


@inner
def _unlink(a, page, end, from_before, scratch):  # type: ignore[no-untyped-def]
    """Removes the contexts that end before offset ``end`` of a page from the tables.

    The newest comes first: if a context stands there twice, its newer place leads to the older one.

    Args:
        from_before: whether only contexts that begin in the page before are removed.
    """
    hashes = scratch.waiting
    known = hash_page_contexts(a, page, 0, end, hashes, scratch.prefix)
    for level in range(NUM_LEVELS):
        begin, stop = _ends(level, known, end, from_before)
        for j in range(begin, stop):
            prefetch_context(a.table, level, hashes[j, level])
    for level in range(NUM_LEVELS):
        begin, stop = _ends(level, known, end, from_before)
        for j in range(stop - 1, begin - 1, -1):
            position = page * PAGE + j
            older = np.int64(a.older[position, level])
            replace_place(a.table, level, hashes[j, level], position, older)


@inner
def _free_page(a, page, scratch):  # type: ignore[no-untyped-def]
    """Removes a page's contexts from the tables, and the page from its sequence."""
    length = np.int64(a.pages[page, LENGTH])
    if a.pages[page, NEXT] >= 0:
        following = np.int64(a.pages[page, NEXT])
        _unlink(a, following, min(np.int64(a.pages[following, LENGTH]), LONGEST - 1), True, scratch)
    _unlink(a, page, length, False, scratch)
    prev, after, slot = a.pages[page, PREV], a.pages[page, NEXT], np.int64(a.pages[page, OWNER])
    if prev >= 0:
        a.pages[prev, NEXT] = after
    else:
        a.slots[slot, HEAD] = after
    if after >= 0:
        a.pages[after, PREV] = prev
        a.pages[after, FLAGS] |= CUT
    else:
        a.slots[slot, TAIL] = prev
    a.pages[page, LENGTH] = 0
    a.scalars[NUM_TOKENS] -= length
    a.free_pages[a.scalars[NUM_FREE_PAGES]] = page
    a.scalars[NUM_FREE_PAGES] += 1
    if a.slots[slot, HEAD] < 0 and not a.slots[slot, IS_OPEN]:
        _free_slot(a, slot)


@inner
def _evict(a, scratch):  # type: ignore[no-untyped-def]
    """Evicts the first unused page of the next ``_SCAN_PAGES``, or a little used one.

    Counts down the use of the pages that it scans. The last page of an open sequence stays.
    """
    victim = -1
    for _ in range(_SCAN_PAGES):
        page = a.scalars[HAND]
        a.scalars[HAND] = (page + 1) % a.pages.shape[0]
        slot = np.int64(a.pages[page, OWNER])
        is_end = a.slots[slot, IS_OPEN] and a.slots[slot, TAIL] == page
        if a.pages[page, LENGTH] == 0 or is_end:
            continue
        if victim < 0 or a.page_use[page] < a.page_use[victim]:
            victim = page
        if a.page_use[page] == 0:
            break
        a.page_use[page] -= 1
    if victim >= 0:
        a.scalars[NUM_EVICTED] += a.pages[victim, LENGTH]
        _free_page(a, victim, scratch)


@kernel
def free_a_slot(a, scratch):  # type: ignore[no-untyped-def]
    """If no slot is free, evicts at most ``_SCAN_PAGES`` pages until a sequence has none left."""
    for _ in range(_SCAN_PAGES):
        if a.scalars[NUM_FREE_SLOTS]:
            return
        _evict(a, scratch)


@inner
def _add_page(a, slot, scratch):  # type: ignore[no-untyped-def]
    """Adds a last page to a sequence and returns it; -1 if no page is free or can be evicted."""
    if a.scalars[NUM_FREE_PAGES] == 0:
        _evict(a, scratch)
        if a.scalars[NUM_FREE_PAGES] == 0:
            return -1
    a.scalars[NUM_FREE_PAGES] -= 1
    page = np.int64(a.free_pages[a.scalars[NUM_FREE_PAGES]])
    tail = a.slots[slot, TAIL]
    a.pages[page, PREV] = tail
    a.pages[page, NEXT] = -1
    if tail >= 0:
        a.pages[tail, NEXT] = page
    else:
        a.slots[slot, HEAD] = page
    a.slots[slot, TAIL] = page
    a.pages[page, LENGTH] = 0
    a.pages[page, OWNER] = slot
    a.pages[page, FLAGS] = a.slots[slot, NEXT_FLAGS]
    a.page_use[page] = 1
    a.slots[slot, NEXT_FLAGS] &= ~CUT
    return page


@inner
def put_waiting(a, scratch, count):  # type: ignore[no-untyped-def]
    """Inserts the waiting contexts of ``count`` tokens into the tables."""
    for k in range(count):
        context = scratch.waiting[k]
        position = np.int64(context[_POSITION])
        for level in range(NUM_LEVELS):
            older = -1
            if level < np.int64(context[_NUM_LEVELS]):
                older = put_place(a, level, context[level], position)
            a.older[position, level] = older


@inner
def _wait(a, scratch, waiting, page, begin, end):  # type: ignore[no-untyped-def]
    """Adds the contexts that end at a page's offsets ``begin .. end - 1`` to the waiting ones."""
    contexts = scratch.waiting[waiting : waiting + end - begin]
    known = hash_page_contexts(a, page, begin, end, contexts, scratch.prefix)
    for j in range(end - begin):
        num_levels = 0
        while num_levels < NUM_LEVELS and LENGTHS[num_levels] <= known + j + 1:
            prefetch_context(a.table, num_levels, contexts[j, num_levels])
            num_levels += 1
        contexts[j, _POSITION] = page * PAGE + begin + j
        contexts[j, _NUM_LEVELS] = num_levels
    return waiting + end - begin


@inner
def append(a, scratch, waiting, slot, text, begin, end):  # type: ignore[no-untyped-def]
    """Appends text to a sequence while there is room; :func:`put_waiting` inserts its contexts.

    A token's contexts are inserted together with the token after it: the ends of open texts, which
    have nothing to draft, would delay each lookup.

    Args:
        waiting: number of tokens whose contexts wait in the scratch.
        slot: slot of an open sequence.
        text: int32 ``[>= end]``; ``text[begin:end]`` is new.

    Returns:
        Number of tokens whose contexts wait now.
    """
    column = begin
    while column < end:
        page = np.int64(a.slots[slot, TAIL])
        if page < 0 or a.pages[page, LENGTH] == PAGE or a.slots[slot, NEXT_FLAGS] & CUT:
            put_waiting(a, scratch, waiting)  # before _add_page evicts one of their pages
            waiting = 0
            page = _add_page(a, slot, scratch)
            if page < 0:
                a.slots[slot, NEXT_FLAGS] |= CUT
                return 0
        offset = np.int64(a.pages[page, LENGTH])
        count = min(PAGE - offset, end - column)
        if waiting + count > PAGE:
            put_waiting(a, scratch, waiting)
            waiting = 0
        for j in range(count):
            a.tokens[page * PAGE + offset + j] = text[column + j]
        a.pages[page, LENGTH] = offset + count
        prev = np.int64(a.pages[page, PREV])
        if offset == 0 and prev >= 0 and not a.pages[page, FLAGS] & CUT:
            waiting = _wait(a, scratch, waiting, prev, PAGE - 1, PAGE)
        waiting = _wait(a, scratch, waiting, page, max(offset - 1, 0), offset + count - 1)
        a.scalars[NUM_TOKENS] += count
        a.scalars[NUM_INGESTED] += count
        column += count
    return waiting


@kernel
def append_one(a, scratch, sequence, tokens):  # type: ignore[no-untyped-def]
    """Appends tokens, int32 ``[k]``, to a sequence; does nothing if it is not open."""
    slot = open_slot(a, sequence)
    if slot >= 0:
        waiting = append(a, scratch, 0, slot, tokens, 0, tokens.shape[0])
        put_waiting(a, scratch, waiting)


@kernel
def remove(a, scratch, slot):  # type: ignore[no-untyped-def]
    """Removes a sequence with all its tokens."""
    a.slots[slot, IS_OPEN] = 1  # else _free_page frees the slot too
    while a.slots[slot, TAIL] >= 0:
        _free_page(a, np.int64(a.slots[slot, TAIL]), scratch)
    a.slots[slot, IS_OPEN] = 0
    _free_slot(a, slot)
