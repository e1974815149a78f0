"""Contexts by their hashes: the tables that lead from the last tokens to where they stood.

A table's entry is the newest place of a context, and its tag: half of the context's hash. Compiled
into the kernels that use it.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from specserve.core.compile import inner
from specserve.trie.layout import BUCKET, CUT, FLAGS, LEVELS, MOST_USE, PAGE, PREV

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


@intrinsic
def prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Has the processor fetch the cache line of ``array.flat[index]``; the array is contiguous.

    A memory of this size is in no cache. The kernels say of many rows what they will read, and
    then read it, so that the processor waits for all of it at once.
    """

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.gep(made.data, [arguments[1]])
        byte = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
            builder.module, kind, "llvm.prefetch.p0"
        )
        options = [ir.Constant(word, value) for value in (0, 3, 1)]  # to read, keep, data
        builder.call(function, [builder.bitcast(address, byte), *options])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@njit(nogil=True, inline="always")
def mix(state):  # type: ignore[no-untyped-def]
    """A rolling hash made fit for the tables."""
    mixed = (state ^ (state >> _S29)) * _FINALIZER
    return mixed ^ (mixed >> _S32)


@njit(nogil=True, inline="always")
def _bucket(table, mixed):  # type: ignore[no-untyped-def]
    """First entry of the bucket of a hash."""
    num_buckets = np.uint64(table.shape[1] // BUCKET)
    return np.int64((((mixed >> _S32) * num_buckets) >> _S32) * _NUM_BUCKET)


@njit(nogil=True, inline="always")
def prefetch_context(table, level, mixed):  # type: ignore[no-untyped-def]
    """Says that a context will be looked for."""
    prefetch(table, level * table.shape[1] + _bucket(table, mixed))


@inner
def hash_page_contexts(a, page, begin, end, states, window):  # type: ignore[no-untyped-def]
    """Mixed hash of each level's context that ends at offsets ``begin .. end - 1`` of a page.

    Args:
        a: arrays.
        page: whose tokens are written up to ``end``.
        begin: first offset.
        end: one past the last offset.
        states: uint64 ``[levels, PAGE]``, written from index 0 on.
        window: int32 ``[LONGEST + PAGE]``, scratch.

    Returns:
        How many tokens stand before ``begin``, at most the longest context.
    """
    known = min(begin, LONGEST)
    before = 0
    prev = np.int64(a.pages[page, PREV])
    if known < LONGEST and not a.pages[page, FLAGS] & CUT and prev >= 0:
        before = LONGEST - known  # the page before it is full
        start = prev * PAGE + PAGE - before
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
            states[level, j - known] = mix(state)
    return known


@njit(nogil=True, inline="always")
def put_place(a, level, mixed, position):  # type: ignore[no-untyped-def]
    """Notes a context's newest place; returns the one noted before, or -1.

    In a full bucket the context goes whose page is used least.
    """
    start = _bucket(a.table, mixed)
    tag = mixed & _LOW
    entry = (tag << _S32) | np.uint64(position + 1)
    for i in range(start, start + BUCKET):
        found = a.table[level, i]
        if found == 0:
            a.table[level, i] = entry
            return -1
        if found >> _S32 == tag:
            a.table[level, i] = entry
            return np.int64(found & _LOW) - 1
    least, victim, first = MOST_USE + 1, start, np.int64(mixed >> _S29) & (BUCKET - 1)
    for i in range(BUCKET):
        slot = start + (first + i) % BUCKET
        use = a.page_use[(np.int64(a.table[level, slot] & _LOW) - 1) // PAGE]
        if use < least:
            least, victim = use, slot
            if not use:
                break
    a.table[level, victim] = entry
    return -1


@njit(nogil=True, inline="always")
def newest_place(table, level, mixed):  # type: ignore[no-untyped-def]
    """A context's newest place, or -1."""
    start = _bucket(table, mixed)
    tag = mixed & _LOW
    for i in range(start, start + BUCKET):
        found = table[level, i]
        if found == 0:
            return -1
        if found >> _S32 == tag:
            return np.int64(found & _LOW) - 1
    return -1


@njit(nogil=True, inline="always")
def replace_place(table, level, mixed, position, older):  # type: ignore[no-untyped-def]
    """Where ``position`` is a context's newest place, puts the older one there, or nothing."""
    start = _bucket(table, mixed)
    end = start + BUCKET
    entry = ((mixed & _LOW) << _S32) | np.uint64(position + 1)
    for i in range(start, end):
        if table[level, i] == entry:
            if older >= 0:
                table[level, i] = (entry & ~_LOW) | np.uint64(older + 1)
                return
            last = i  # the bucket stays without gaps
            while last + 1 < end and table[level, last + 1] != 0:
                last += 1
            table[level, i] = table[level, last]
            table[level, last] = np.uint64(0)
            return
