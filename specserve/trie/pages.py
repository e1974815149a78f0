"""What a trie learns and forgets: text is appended to pages, and pages are freed.

The text is a log of pages. For each token the hashes of the last 2, 4, 8 and 16 tokens lead to the
newest place where they stood, and from place to place to the older ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

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

_AHEAD = 64
"""Tokens whose buckets are fetched before the first of them is put in."""


class Scratch(NamedTuple):
    """What learning and forgetting write on.

    Attributes:
        states: uint64 ``[levels, PAGE]``, hashes of a page's contexts.
        window: int32 ``[LONGEST + PAGE]``, a page's tokens and those before it.
        mixed: uint64 ``[_AHEAD, levels]``, hashes of the contexts that are to be put in.
        positions: int64 ``[_AHEAD]``, their places.
        num_levels: int64 ``[_AHEAD]``, how many of each there are.
    """

    states: npt.NDArray[np.uint64]
    window: npt.NDArray[np.int32]
    mixed: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]
    num_levels: npt.NDArray[np.int64]


@njit(nogil=True)
def new_scratch():  # type: ignore[no-untyped-def]
    """Room for :func:`append`."""
    return Scratch(
        np.empty((NUM_LEVELS, PAGE), np.uint64),
        np.empty(LONGEST + PAGE, np.int32),
        np.empty((_AHEAD, NUM_LEVELS), np.uint64),
        np.empty(_AHEAD, np.int64),
        np.empty(_AHEAD, np.int64),
    )


@njit(nogil=True, inline="always")
def open_slot(a, sequence):  # type: ignore[no-untyped-def]
    """The slot of a sequence by its number; -1: it was closed, removed or cleared since."""
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
    states = scratch.states
    known = hash_page_contexts(a, page, 0, length, states, scratch.window)
    for level in range(NUM_LEVELS):
        for j in range(max(LENGTHS[level] - known - 1, 0), length):
            prefetch_context(a.table, level, states[level, j])
    for level in range(NUM_LEVELS):
        for j in range(max(LENGTHS[level] - known - 1, 0), length):
            position = page * PAGE + j
            older = np.int64(a.older[position, level])
            replace_place(a.table, level, states[level, j], position, older)
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
        a.slots[slot, NEXT_FLAGS] |= CUT  # what comes next does not follow what is left
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
def _put(a, scratch, count):  # type: ignore[no-untyped-def]
    """Puts ``count`` tokens' contexts into the tables."""
    for k in range(count):
        position = scratch.positions[k]
        for level in range(NUM_LEVELS):
            older = -1
            if level < scratch.num_levels[k]:
                older = put_place(a, level, scratch.mixed[k, level], position)
            a.older[position, level] = older


@inner
def append(a, scratch, slots, token_ids, begins, ends, num_prompt_tokens):  # type: ignore[no-untyped-def]
    """Adds text to sequences.

    Args:
        a: arrays.
        scratch: see :func:`new_scratch`.
        slots: int64 ``[n]``, of open sequences; -1: none, the row is passed over.
        token_ids: int32 ``[n, >= max(ends)]``.
        begins: int64 ``[n]``, first column that is new.
        ends: int64 ``[n]``, one past the last.
        num_prompt_tokens: int32 ``[n]``, columns before this one are prompt.

    Returns:
        How many tokens found no room.
    """
    states, mixed, num_levels = scratch.states, scratch.mixed, scratch.num_levels
    waiting, lost = 0, 0
    for row in range(slots.shape[0]):
        slot, column, end = slots[row], begins[row], ends[row]
        while slot >= 0 and column < end:
            page = np.int64(a.slots[slot, TAIL])
            if page < 0 or a.pages[page, LENGTH] == PAGE or a.slots[slot, NEXT_FLAGS] & CUT:
                _put(a, scratch, waiting)  # one of them may be evicted now
                waiting = 0
                page = _add_page(a, slot, scratch)
                if page < 0:
                    lost += end - column
                    a.slots[slot, NEXT_FLAGS] |= CUT
                    break
            offset = np.int64(a.pages[page, LENGTH])
            count = min(PAGE - offset, end - column)
            for j in range(count):
                a.tokens[page * PAGE + offset + j] = token_ids[row, column + j]
            a.pages[page, LENGTH] = offset + count
            first_output = offset + max(num_prompt_tokens[row] - column, 0)
            if first_output < offset + count:
                a.pages[page, OUTPUT] = min(a.pages[page, OUTPUT], first_output)
            known = hash_page_contexts(a, page, offset, offset + count, states, scratch.window)
            for j in range(count):
                if waiting == _AHEAD:
                    _put(a, scratch, waiting)
                    waiting = 0
                scratch.positions[waiting] = page * PAGE + offset + j
                num_levels[waiting] = 0
                for level in range(NUM_LEVELS):
                    if LENGTHS[level] <= known + j + 1:
                        mixed[waiting, level] = states[level, j]
                        prefetch_context(a.table, level, states[level, j])
                        num_levels[waiting] = level + 1
                waiting += 1
            a.scalars[NUM_TOKENS] += count
            a.scalars[CLOCK] += count
            column += count
    _put(a, scratch, waiting)
    return lost


@kernel
def append_one(a, sequence, tokens, num_prompt_tokens):  # type: ignore[no-untyped-def]
    """Adds int32 ``[k]`` tokens to a sequence; returns how many found no room."""
    slots, prompts = np.empty(1, np.int64), np.empty(1, np.int32)
    slots[0], prompts[0] = open_slot(a, sequence), num_prompt_tokens
    begins, ends = np.zeros(1, np.int64), np.full(1, tokens.shape[0], np.int64)
    return append(a, new_scratch(), slots, tokens.reshape(1, -1), begins, ends, prompts)


@kernel
def remove(a, slot):  # type: ignore[no-untyped-def]
    """Removes a sequence with all its tokens; returns how many they were."""
    scratch = new_scratch()
    before = a.scalars[NUM_TOKENS]
    a.slots[slot, IS_OPEN] = 1  # so that its slot is freed once, below
    while a.slots[slot, TAIL] >= 0:
        _free_page(a, np.int64(a.slots[slot, TAIL]), scratch)
    a.slots[slot, IS_OPEN] = 0
    _free_slot(a, slot)
    return before - a.scalars[NUM_TOKENS]
