"""Contexts by their hashes: the tables that lead from the last tokens to where they stood.

A table's entry is the newest place of a context, and its tag: half of the context's hash. Compiled
into the kernels that use it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from specserve.trie.layout import BUCKET, CUT, LEVELS, MOST_USE, PAGE

LENGTHS = np.array(LEVELS, np.int64)
LONGEST = LEVELS[-1]
NUM_LEVELS = len(LEVELS)

MULTIPLIER, ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
"""Of the rolling hash: a token ``t`` more makes ``hash * MULTIPLIER + t + ONE`` of it."""

_FINALIZER = np.uint64(0xD6E8FEB86659FD93)
_LOW = np.uint64(0xFFFFFFFF)
_S29, _S32 = np.uint64(29), np.uint64(32)
_NUM_BUCKET = np.uint64(BUCKET)


def _outgoing() -> tuple[int, ...]:
    """The multiplier's powers by which a token leaves each level's rolling hash."""
    return tuple(pow(int(MULTIPLIER), length, 1 << 64) for length in LEVELS)


_OUTGOING = np.array(_outgoing(), np.uint64)


@njit(nogil=True, inline="always")
def mix(state):  # type: ignore[no-untyped-def]
    """A rolling hash made fit for the tables."""
    mixed = (state ^ (state >> _S29)) * _FINALIZER
    return mixed ^ (mixed >> _S32)


@njit(nogil=True, inline="always")
def _bucket(mixed, num_buckets):  # type: ignore[no-untyped-def]
    """First entry of the bucket of a hash."""
    return (((mixed >> _S32) * num_buckets) >> _S32) * _NUM_BUCKET


@njit(nogil=True)
def hash_page_contexts(a, page, begin, end, states):  # type: ignore[no-untyped-def]
    """Hash of each level's context that ends at offsets ``begin .. end - 1`` of a page.

    Args:
        a: arrays.
        page: whose tokens are written up to ``end``.
        begin: first offset.
        end: one past the last offset.
        states: uint64 ``[levels, PAGE]``, written from index 0 on.

    Returns:
        How many tokens stand before ``begin``, at most the longest context.
    """
    window = np.empty(LONGEST + PAGE, np.int32)
    known = min(begin, LONGEST)
    before = 0
    if known < LONGEST and not a.page_flags[page] & CUT and a.page_prev[page] >= 0:
        before = LONGEST - known  # the page before it is full
        start = a.page_prev[page] * PAGE + PAGE - before
        for j in range(before):
            window[j] = a.tokens[start + j]
    for j in range(known + end - begin):
        window[before + j] = a.tokens[page * PAGE + begin - known + j]
    known += before
    for level in range(NUM_LEVELS):
        length = LENGTHS[level]
        state = np.uint64(0)
        for j in range(max(known - length, 0), known):
            state = state * MULTIPLIER + np.uint64(window[j]) + ONE
        for j in range(known, known + end - begin):
            state = state * MULTIPLIER + np.uint64(window[j]) + ONE
            if j >= length:
                state -= (np.uint64(window[j - length]) + ONE) * _OUTGOING[level]
            states[level, j - known] = state
    return known


@njit(nogil=True, inline="always")
def put_place(table, page_use, mixed, num_buckets, position):  # type: ignore[no-untyped-def]
    """Notes a context's newest place; returns the one noted before, or -1.

    In a full bucket the context goes whose page is used least.
    """
    start = _bucket(mixed, num_buckets)
    tag = mixed & _LOW
    entry = (tag << _S32) | np.uint64(position + 1)
    for i in range(BUCKET):
        slot = start + np.uint64(i)
        found = table[slot]
        if found == 0:
            table[slot] = entry
            return -1
        if found >> _S32 == tag:
            table[slot] = entry
            return np.int64(found & _LOW) - 1
    least, victim = MOST_USE + 1, start
    for i in range(BUCKET):
        slot = start + ((mixed >> _S29) + np.uint64(i)) % _NUM_BUCKET
        use = page_use[(np.int64(table[slot] & _LOW) - 1) // PAGE]
        if use < least:
            least, victim = use, slot
            if not use:
                break
    table[victim] = entry
    return -1


@njit(nogil=True, inline="always")
def newest_place(table, mixed, num_buckets):  # type: ignore[no-untyped-def]
    """A context's newest place, or -1."""
    start = _bucket(mixed, num_buckets)
    tag = mixed & _LOW
    for i in range(BUCKET):
        found = table[start + np.uint64(i)]
        if found == 0:
            return -1
        if found >> _S32 == tag:
            return np.int64(found & _LOW) - 1
    return -1


@njit(nogil=True, inline="always")
def replace_place(table, mixed, num_buckets, position, older):  # type: ignore[no-untyped-def]
    """Where ``position`` is a context's newest place, puts the older one there, or nothing."""
    start = _bucket(mixed, num_buckets)
    entry = ((mixed & _LOW) << _S32) | np.uint64(position + 1)
    for i in range(BUCKET):
        slot = start + np.uint64(i)
        if table[slot] == entry:
            if older >= 0:
                table[slot] = (entry & ~_LOW) | np.uint64(older + 1)
                return
            last = i  # the bucket stays without gaps
            while last + 1 < BUCKET and table[start + np.uint64(last + 1)] != 0:
                last += 1
            table[slot] = table[start + np.uint64(last)]
            table[start + np.uint64(last)] = np.uint64(0)
            return
