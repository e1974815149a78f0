"""What a trie learns and forgets: text is appended to pages, and pages are freed.

The text is a log of pages. For each token the hashes of the last 2, 4, 8 and 16 tokens lead to the
newest place where they stood, and from place to place to the older ones.
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
    CLOCK,
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
    NUM_TOKENS,
    OUTPUT,
    OWNER,
    PAGE,
    PREV,
    STAMP,
    TAIL,
)

_SCAN_PAGES = 32

_POSITION, _NUM_LEVELS = NUM_LEVELS, NUM_LEVELS + 1
"""Columns of ``Scratch.waiting`` behind the hashes: the context's place, how many there are."""


class Scratch(NamedTuple):
    """What learning and forgetting write on.

    Attributes:
        waiting: uint64 ``[PAGE, levels + 2]``, contexts that are to be put into the tables. Their
            buckets are fetched before the first of them is put in.
        prefix: uint64 ``[1 + LONGEST + PAGE]``, rolling hashes.
    """

    waiting: npt.NDArray[np.uint64]
    prefix: npt.NDArray[np.uint64]

    @classmethod
    def empty(cls) -> Self:
        """Room for :func:`append`."""
        return cls(
            np.zeros((PAGE, NUM_LEVELS + 2), np.uint64), np.zeros(1 + LONGEST + PAGE, np.uint64)
        )


@inner
def open_slot(a, sequence):  # type: ignore[no-untyped-def]
    """The slot of a sequence by its number; -1: it was closed or cleared since."""
    slot = sequence & 0xFFFFFFFF
    if sequence < 0 or a.slots[slot, GENERATION] != sequence >> 32 or not a.slots[slot, IS_OPEN]:
        return -1
    return slot


@inner
def _free_slot(a, slot):  # type: ignore[no-untyped-def]
    a.free_slots[a.scalars[NUM_FREE_SLOTS]] = slot
    a.scalars[NUM_FREE_SLOTS] += 1


@inner
def _free_page(a, page, scratch):  # type: ignore[no-untyped-def]
    """Takes a page's contexts out of the tables and the page out of its sequence."""
    length = np.int64(a.pages[page, LENGTH])
    hashes = scratch.waiting
    known = hash_page_contexts(a, page, 0, length, hashes, scratch.prefix)
    for level in range(NUM_LEVELS):
        for j in range(max(LENGTHS[level] - known - 1, 0), length):
            prefetch_context(a.table, level, hashes[j, level])
    for level in range(NUM_LEVELS):
        for j in range(max(LENGTHS[level] - known - 1, 0), length):
            position = page * PAGE + j
            older = np.int64(a.older[position, level])
            replace_place(a.table, level, hashes[j, level], position, older)
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
    """Frees the least used of the next pages; at most ``_SCAN_PAGES`` are looked at."""
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
    """Where no slot is free, evicts pages until a sequence has none left; looks at some only."""
    for _ in range(_SCAN_PAGES):
        if a.scalars[NUM_FREE_SLOTS]:
            return
        _evict(a, scratch)


@inner
def _add_page(a, slot, scratch):  # type: ignore[no-untyped-def]
    """A new last page for a sequence; -1: nothing can be evicted for it."""
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
    a.pages[page, OUTPUT] = PAGE
    a.pages[page, OWNER] = slot
    a.pages[page, STAMP] = a.scalars[CLOCK] // PAGE
    a.pages[page, FLAGS] = a.slots[slot, NEXT_FLAGS]
    a.page_use[page] = 1
    a.slots[slot, NEXT_FLAGS] &= ~CUT
    return page


@inner
def put_waiting(a, scratch, count):  # type: ignore[no-untyped-def]
    """Puts ``count`` tokens' contexts into the tables."""
    for k in range(count):
        context = scratch.waiting[k]
        position = np.int64(context[_POSITION])
        for level in range(NUM_LEVELS):
            older = -1
            if level < np.int64(context[_NUM_LEVELS]):
                older = put_place(a, level, context[level], position)
            a.older[position, level] = older


@inner
def append(a, scratch, waiting, slot, text, begin, end, num_prompt_tokens):  # type: ignore[no-untyped-def]
    """Adds text to a sequence, as far as there is room; :func:`put_waiting` makes it known.

    Args:
        waiting: tokens whose contexts are in the scratch.
        slot: of an open sequence.
        text: int32 ``[>= end]``; new is ``text[begin:end]``.
        num_prompt_tokens: tokens before this one are prompt.

    Returns:
        How many tokens' contexts wait now.
    """
    column = begin
    while column < end:
        page = np.int64(a.slots[slot, TAIL])
        if page < 0 or a.pages[page, LENGTH] == PAGE or a.slots[slot, NEXT_FLAGS] & CUT:
            put_waiting(a, scratch, waiting)  # one of them may be evicted now
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
        first_output = offset + max(num_prompt_tokens - column, 0)
        if first_output < offset + count:
            a.pages[page, OUTPUT] = min(a.pages[page, OUTPUT], first_output)
        contexts = scratch.waiting[waiting : waiting + count]
        known = hash_page_contexts(a, page, offset, offset + count, contexts, scratch.prefix)
        for j in range(count):
            num_levels = 0
            while num_levels < NUM_LEVELS and LENGTHS[num_levels] <= known + j + 1:
                prefetch_context(a.table, num_levels, contexts[j, num_levels])
                num_levels += 1
            contexts[j, _POSITION] = page * PAGE + offset + j
            contexts[j, _NUM_LEVELS] = num_levels
        waiting += count
        a.scalars[NUM_TOKENS] += count
        a.scalars[CLOCK] += count
        column += count
    return waiting


@kernel
def append_one(a, scratch, sequence, tokens, num_prompt_tokens):  # type: ignore[no-untyped-def]
    """Adds int32 ``[k]`` tokens to a sequence."""
    slot = open_slot(a, sequence)
    if slot >= 0:
        waiting = append(a, scratch, 0, slot, tokens, 0, tokens.shape[0], num_prompt_tokens)
        put_waiting(a, scratch, waiting)


@kernel
def remove(a, scratch, slot):  # type: ignore[no-untyped-def]
    """Removes a sequence with all its tokens."""
    a.slots[slot, IS_OPEN] = 1  # so that its slot is freed once, below
    while a.slots[slot, TAIL] >= 0:
        _free_page(a, np.int64(a.slots[slot, TAIL]), scratch)
    a.slots[slot, IS_OPEN] = 0
    _free_slot(a, slot)
