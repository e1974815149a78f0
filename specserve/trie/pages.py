"""What a trie learns and forgets: text is appended to pages, and pages are freed.

The text is a log of pages. For each token the hashes of the last 2, 4, 8 and 16 tokens lead to the
newest place where they stood, and from place to place to the older ones.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from specserve.core.compile import kernel
from specserve.trie.contexts import (
    LENGTHS,
    NUM_LEVELS,
    hash_page_contexts,
    mix,
    put_place,
    replace_place,
)
from specserve.trie.layout import (
    BUCKET,
    CLOCK,
    CUT,
    HAND,
    NUM_EVICTED,
    NUM_FREE_PAGES,
    NUM_FREE_SLOTS,
    NUM_TOKENS,
    PAGE,
)

_SCAN_PAGES = 32


@njit(nogil=True)
def _free_page(a, page, states):  # type: ignore[no-untyped-def]
    """Takes a page's contexts out of the tables and the page out of its sequence."""
    length = a.page_length[page]
    known = hash_page_contexts(a, page, 0, length, states)
    num_buckets = np.uint64(a.table.shape[1] // BUCKET)
    for level in range(NUM_LEVELS):
        for j in range(max(LENGTHS[level] - known - 1, 0), length):
            position = page * PAGE + j
            mixed = mix(states[level, j])
            replace_place(a.table[level], mixed, num_buckets, position, a.older[level, position])
    prev, after, slot = a.page_prev[page], a.page_next[page], a.page_slot[page]
    if prev >= 0:
        a.page_next[prev] = after
    else:
        a.slot_head[slot] = after
    if after >= 0:
        a.page_prev[after] = prev
        a.page_flags[after] |= CUT
    else:
        a.slot_tail[slot] = prev
        a.slot_flags[slot] |= CUT  # what comes next does not follow what is left
    a.page_length[page] = 0
    a.scalars[NUM_TOKENS] -= length
    a.free_pages[a.scalars[NUM_FREE_PAGES]] = page
    a.scalars[NUM_FREE_PAGES] += 1
    if a.slot_head[slot] < 0 and not a.slot_open[slot]:
        a.free_slots[a.scalars[NUM_FREE_SLOTS]] = slot
        a.scalars[NUM_FREE_SLOTS] += 1


@njit(nogil=True)
def _evict(a, states):  # type: ignore[no-untyped-def]
    """Frees the least used of the next pages; at most ``_SCAN_PAGES`` are looked at."""
    victim = -1
    for _ in range(_SCAN_PAGES):
        page = a.scalars[HAND]
        a.scalars[HAND] = (page + 1) % a.page_length.shape[0]
        slot = a.page_slot[page]
        if a.page_length[page] == 0 or (a.slot_open[slot] and a.slot_tail[slot] == page):
            continue
        if victim < 0 or a.page_use[page] < a.page_use[victim]:
            victim = page
        if a.page_use[page] == 0:
            break
        a.page_use[page] -= 1
    if victim >= 0:
        a.scalars[NUM_EVICTED] += a.page_length[victim]
        _free_page(a, victim, states)


@njit(nogil=True)
def _add_page(a, slot, states):  # type: ignore[no-untyped-def]
    """A new last page for a sequence; -1: nothing can be evicted for it."""
    if a.scalars[NUM_FREE_PAGES] == 0:
        _evict(a, states)
        if a.scalars[NUM_FREE_PAGES] == 0:
            return -1
    a.scalars[NUM_FREE_PAGES] -= 1
    page = a.free_pages[a.scalars[NUM_FREE_PAGES]]
    tail = a.slot_tail[slot]
    a.page_prev[page] = tail
    a.page_next[page] = -1
    if tail >= 0:
        a.page_next[tail] = page
    else:
        a.slot_head[slot] = page
    a.slot_tail[slot] = page
    a.page_length[page] = 0
    a.page_output[page] = PAGE
    a.page_slot[page] = slot
    a.page_stamp[page] = a.scalars[CLOCK]
    a.page_use[page] = 1
    a.page_flags[page] = a.slot_flags[slot]
    a.slot_flags[slot] &= ~np.uint8(CUT)
    return page


@kernel
def append(a, slots, token_ids, begins, ends, num_prompt_tokens):  # type: ignore[no-untyped-def]
    """Adds text to sequences.

    Args:
        a: arrays.
        slots: int64 ``[n]``, open sequences; -1: none, the row is passed over.
        token_ids: int32 ``[n, >= max(ends)]``.
        begins: int64 ``[n]``, first column that is new.
        ends: int64 ``[n]``, one past the last.
        num_prompt_tokens: int64 ``[n]``, columns before this one are prompt.

    Returns:
        How many tokens found no room.
    """
    states = np.empty((NUM_LEVELS, PAGE), np.uint64)
    num_buckets = np.uint64(a.table.shape[1] // BUCKET)
    lost = 0
    for row in range(slots.shape[0]):
        slot, column, end = slots[row], begins[row], ends[row]
        while slot >= 0 and column < end:
            page = a.slot_tail[slot]
            if page < 0 or a.page_length[page] == PAGE or a.slot_flags[slot] & CUT:
                page = _add_page(a, slot, states)
                if page < 0:
                    lost += end - column
                    a.slot_flags[slot] |= CUT
                    break
            offset = a.page_length[page]
            count = min(PAGE - offset, end - column)
            for j in range(count):
                a.tokens[page * PAGE + offset + j] = token_ids[row, column + j]
            a.page_length[page] = offset + count
            first_output = offset + max(num_prompt_tokens[row] - column, 0)
            if first_output < offset + count:
                a.page_output[page] = min(a.page_output[page], first_output)
            known = hash_page_contexts(a, page, offset, offset + count, states)
            for level in range(NUM_LEVELS):
                for j in range(max(LENGTHS[level] - known - 1, 0), count):
                    position = page * PAGE + offset + j
                    mixed = mix(states[level, j])
                    a.older[level, position] = put_place(
                        a.table[level], a.page_use, mixed, num_buckets, position
                    )
            a.scalars[NUM_TOKENS] += count
            a.scalars[CLOCK] += count
            column += count
    return lost


@kernel
def remove(a, slot):  # type: ignore[no-untyped-def]
    """Removes a sequence with all its tokens; returns how many they were."""
    states = np.empty((NUM_LEVELS, PAGE), np.uint64)
    before = a.scalars[NUM_TOKENS]
    a.slot_open[slot] = True  # so that its slot is freed once, below
    while a.slot_tail[slot] >= 0:
        _free_page(a, a.slot_tail[slot], states)
    a.slot_open[slot] = False
    a.free_slots[a.scalars[NUM_FREE_SLOTS]] = slot
    a.scalars[NUM_FREE_SLOTS] += 1
    return before - a.scalars[NUM_TOKENS]
