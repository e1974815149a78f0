"""Hash tables from contexts, the last tokens of a text, to the places where they stood.

A table's entry holds the newest place of a context, and a tag: half of the context's hash.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import intrinsic

from specserve.core.compile import inner
from specserve.trie.layout import BUCKET, CUT, FLAGS, LEVELS, MAX_USE, PAGE, PREV

LENGTHS = np.array(LEVELS, np.int64)
LONGEST = LEVELS[-1]
NUM_LEVELS = len(LEVELS)

MULTIPLIER, ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
"""Of the rolling hash: with a token ``t`` it becomes ``hash * MULTIPLIER + t + ONE``."""

_FINALIZER = np.uint64(0xD6E8FEB86659FD93)
_LOW = np.uint64(0xFFFFFFFF)
_HIGH = ~_LOW
_ALL, _ZERO = ~np.uint64(0), np.uint64(0)
_S29, _S32 = np.uint64(29), np.uint64(32)
_NUM_BUCKET = np.uint64(BUCKET)

_OUTGOING = np.array([pow(int(MULTIPLIER), length, 1 << 64) for length in LEVELS], np.uint64)
"""Powers of the multiplier, by level; they take the tokens before a context out of its hash."""


@intrinsic
def prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Prefetches the cache line of ``array.flat[index]``; the array is contiguous.

    The arrays are larger than the caches. Kernels prefetch for many rows before they read, so that
    the waits for memory overlap.
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


@intrinsic
def _equal(typing_context, table, index, bits, value):  # type: ignore[no-untyped-def]
    """Bit mask of the entries ``e`` in the bucket at ``table.flat[index]`` with
    ``e & bits == value``. One vector comparison, without branches."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        vector = ir.VectorType(ir.IntType(64), BUCKET)
        address = builder.bitcast(builder.gep(made.data, [arguments[1]]), vector.as_pointer())
        first = ir.Constant(ir.VectorType(ir.IntType(32), BUCKET), [0] * BUCKET)

        def broadcast(number: ir.Value) -> ir.Value:
            undefined = ir.Constant(vector, ir.Undefined)
            one = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
            return builder.shuffle_vector(one, undefined, first)

        entries = builder.and_(builder.load(address, align=8), broadcast(arguments[2]))
        equal = builder.icmp_unsigned("==", entries, broadcast(arguments[3]))
        return builder.zext(builder.bitcast(equal, ir.IntType(BUCKET)), ir.IntType(64))

    return types.int64(table, types.int64, types.uint64, types.uint64), codegen


@inner
def mix(state):  # type: ignore[no-untyped-def]
    """The rolling hash with mixed bits: the upper half selects the bucket, the lower is the tag."""
    mixed = (state ^ (state >> _S29)) * _FINALIZER
    return mixed ^ (mixed >> _S32)


@inner
def _bucket(table, mixed):  # type: ignore[no-untyped-def]
    """Index of the first entry in the bucket of a mixed hash."""
    num_buckets = np.uint64(table.shape[1] // BUCKET)
    return np.int64((((mixed >> _S32) * num_buckets) >> _S32) * _NUM_BUCKET)


@inner
def prefetch_context(table, level, mixed):  # type: ignore[no-untyped-def]
    """Prefetches the bucket of a context."""
    prefetch(table, level * table.shape[1] + _bucket(table, mixed))


@inner
def hash_page_contexts(a, page, begin, end, hashes, prefix):  # type: ignore[no-untyped-def]
    """Computes the mixed hashes of the contexts that end at offsets ``begin .. end - 1`` of a page.

    Args:
        page: its tokens are written up to ``end``.
        hashes: uint64 ``[>= end - begin, >= levels]``, output.
        prefix: uint64 ``[1 + LONGEST + PAGE]``, scratch.

    Returns:
        Number of known tokens before ``begin``, at most the longest context.
    """
    known = min(begin, LONGEST)
    first = page * PAGE + begin - known
    before = 0
    prev = np.int64(a.pages[page, PREV])
    if known < LONGEST and not a.pages[page, FLAGS] & CUT and prev >= 0:
        before = LONGEST - known  # the previous page is full
    prefix[0] = state = _ZERO
    for j in range(before):
        state = state * MULTIPLIER + np.uint64(a.tokens[prev * PAGE + PAGE - before + j]) + ONE
        prefix[j + 1] = state
    for j in range(known + end - begin):
        state = state * MULTIPLIER + np.uint64(a.tokens[first + j]) + ONE
        prefix[before + j + 1] = state
    known += before
    for j in range(end - begin):
        for level in range(NUM_LEVELS):
            start = max(known + j + 1 - LENGTHS[level], 0)
            hashes[j, level] = mix(prefix[known + j + 1] - prefix[start] * _OUTGOING[level])
    return known


@inner
def put_place(a, level, mixed, position):  # type: ignore[no-untyped-def]
    """Stores a context's newest place; returns its previous one, or -1.

    In a full bucket it replaces the context whose page is used least.
    """
    start = _bucket(a.table, mixed)
    index = level * a.table.shape[1] + start
    entry = (mixed << _S32) | np.uint64(position + 1)
    free = _equal(a.table, index, _ALL, _ZERO)
    same = _equal(a.table, index, _HIGH, mixed << _S32) & ~free
    if same:
        slot = start + trailing_zeros(same)
        older = np.int64(a.table[level, slot] & _LOW) - 1
        a.table[level, slot] = entry
        return older
    if free:
        a.table[level, start + trailing_zeros(free)] = entry
        return -1
    least, victim, first = MAX_USE + 1, start, np.int64(mixed >> _S29) & (BUCKET - 1)
    for i in range(BUCKET):
        slot = start + (first + i) % BUCKET
        use = a.page_use[(np.int64(a.table[level, slot] & _LOW) - 1) // PAGE]
        if use < least:
            least, victim = use, slot
            if not use:
                break
    a.table[level, victim] = entry
    return -1


@inner
def newest_place(table, level, mixed):  # type: ignore[no-untyped-def]
    """A context's newest place, or -1."""
    start = _bucket(table, mixed)
    index = level * table.shape[1] + start
    same = _equal(table, index, _HIGH, mixed << _S32) & ~_equal(table, index, _ALL, _ZERO)
    if not same:
        return -1
    return np.int64(table[level, start + trailing_zeros(same)] & _LOW) - 1


@inner
def replace_place(table, level, mixed, position, older):  # type: ignore[no-untyped-def]
    """If ``position`` is a context's newest place, stores ``older`` instead; -1 frees the entry."""
    start = _bucket(table, mixed)
    index = level * table.shape[1] + start
    same = _equal(table, index, _ALL, (mixed << _S32) | np.uint64(position + 1))
    if same:
        slot = start + trailing_zeros(same)
        if older >= 0:
            table[level, slot] = (mixed << _S32) | np.uint64(older + 1)
            return
        # The last entry fills the gap.
        last = start + trailing_zeros(_equal(table, index, _ALL, _ZERO) | (1 << BUCKET)) - 1
        table[level, slot] = table[level, last]
        table[level, last] = _ZERO
