"""An index of a growing text: for the last 1 .. 16 tokens, where they stood before.

Numba kernels over flat arrays, without the interpreter lock. One table a request and n-gram size;
an entry packs the n-gram's hash (upper 32 bits) and the position after it (lower 32 bits), 0 is a
free slot. Tables are open-addressed with linear probing and at most half full. Different n-grams
of one hash share an entry (once in 2**32): a lookup compares the tokens themselves, so that such a
pair may hide a match but never makes a wrong one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray, njit, types
from numba.extending import intrinsic

from specserve.core.compile import kernel

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FINALIZER = np.uint64(0xD6E8FEB86659FD93)
_POSITION_MASK = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_S29 = np.uint64(29)
_ONE = np.uint64(1)


@intrinsic
def _as_pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """An address as a pointer to uint64: the way to hand many arrays to one compiled call."""
    signature = types.CPointer(types.uint64)(address)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, codegen


@njit(nogil=True, inline="always")
def _extend(state: np.uint64, token: np.int32) -> np.uint64:
    """The hash state of an n-gram that reaches one token further back."""
    return (state ^ (np.uint64(token) + _ONE)) * _MULTIPLIER


@njit(nogil=True, inline="always")
def _tag(state: np.uint64) -> np.uint64:
    """32 well-mixed bits of a hash state."""
    return ((state ^ (state >> _S29)) * _FINALIZER) >> _S32


@njit(nogil=True, inline="always")
def _put(table, start, mask, tag, position, keep_oldest):  # type: ignore[no-untyped-def]
    """Notes ``position`` for ``tag``; an earlier one stays where ``keep_oldest``."""
    slot = tag & mask
    while True:
        entry = table[start + slot]
        if entry == 0:
            table[start + slot] = (tag << _S32) | position
            return
        if entry >> _S32 == tag:
            if not keep_oldest:
                table[start + slot] = (tag << _S32) | position
            return
        slot = (slot + _ONE) & mask


@njit(nogil=True, inline="always")
def _get(table, start, mask, tag):  # type: ignore[no-untyped-def]
    """The position noted for ``tag``; 0: none."""
    slot = tag & mask
    while True:
        entry = table[start + slot]
        if entry == 0:
            return 0
        if entry >> _S32 == tag:
            return np.int64(entry & _POSITION_MASK)
        slot = (slot + _ONE) & mask


@kernel
def ingest(table, capacity, text, begin, end, min_size, max_size, keep_oldest):  # type: ignore[no-untyped-def]
    """Indexes the n-grams that end at positions ``begin + 1 .. end`` of ``text``."""
    mask = np.uint64(capacity - 1)
    for position in range(begin + 1, end + 1):
        state = np.uint64(0)
        for size in range(1, min(max_size, position) + 1):
            state = _extend(state, text[position - size])
            if size >= min_size:
                start = np.uint64((size - min_size) * capacity)
                _put(table, start, mask, _tag(state), np.uint64(position), keep_oldest)


@kernel
def find(table, capacity, text, length, min_size, max_size, states):  # type: ignore[no-untyped-def]
    """The noted earlier place of the longest indexed suffix of ``text[:length]``.

    Returns:
        (the position after the match, its size); (0, 0): none.
    """
    mask = np.uint64(capacity - 1)
    longest = min(max_size, length)
    state = np.uint64(0)
    for size in range(1, longest + 1):
        state = _extend(state, text[length - size])
        states[size - 1] = state
    for size in range(longest, min_size - 1, -1):
        start = np.uint64((size - min_size) * capacity)
        position = _get(table, start, mask, _tag(states[size - 1]))
        if size <= position < length:
            equal = True
            for back in range(1, size + 1):
                if text[position - back] != text[length - back]:
                    equal = False
                    break
            if equal:
                return position, size
    return 0, 0


@kernel
def copy_from(text, length, position, limit, draft):  # type: ignore[no-untyped-def]
    """Writes ``limit`` tokens from ``position`` on; past the end it reads what it wrote."""
    for j in range(limit):
        source = position + j
        draft[j] = text[source] if source < length else draft[source - length]


@kernel
def step_batch(  # type: ignore[no-untyped-def]
    token_ids,
    num_tokens,
    limits,
    rows,
    addresses,
    capacities,
    indexed,
    targets,
    min_size,
    max_size,
    keep_oldest,
    states,
    drafts,
    lengths,
    sizes,
):
    """One decoding step of the batch: index what is new, look up, copy.

    Args:
        token_ids: int32 ``[n, >= max(num_tokens)]``.
        num_tokens: int32 ``[n]``.
        limits: int32 ``[n]``, longest draft.
        rows: int64 ``[n]``, each request's entry in the three arrays that follow.
        addresses: int64, of each request's tables.
        capacities: int64, slots of one table of each request.
        indexed: int64, positions indexed so far; updated.
        targets: int64 ``[n]``, up to where to index in this step, less than ``num_tokens``.
        min_size: shortest n-gram.
        max_size: longest n-gram.
        keep_oldest: of equal n-grams keep the oldest place, not the newest.
        states: uint64 ``[max_size]``, scratch.
        drafts: int32 ``[n, max(limits)]``, written.
        lengths: int64 ``[n]``, tokens in each draft, written.
        sizes: int64 ``[n]``, matched n-gram of each draft, written.
    """
    num_sizes = max_size - min_size + 1
    for i in range(rows.shape[0]):
        row = rows[i]
        text = token_ids[i]
        length = np.int64(num_tokens[i])
        capacity = capacities[row]
        table = carray(_as_pointer(addresses[row]), num_sizes * capacity)
        if targets[i] > indexed[row]:
            ingest(table, capacity, text, indexed[row], targets[i], min_size, max_size, keep_oldest)
            indexed[row] = targets[i]
        lengths[i] = 0
        sizes[i] = 0
        if limits[i] > 0:
            position, size = find(table, capacity, text, length, min_size, max_size, states)
            if size > 0:
                copy_from(text, length, position, limits[i], drafts[i])
                lengths[i] = limits[i]
                sizes[i] = size


@kernel
def rehash(old, old_capacity, new, new_capacity, num_sizes):  # type: ignore[no-untyped-def]
    """Moves all entries into larger tables."""
    mask = np.uint64(new_capacity - 1)
    for index in range(num_sizes):
        start = np.uint64(index * new_capacity)
        for slot in range(index * old_capacity, (index + 1) * old_capacity):
            entry = old[slot]
            if entry != 0:
                _put(new, start, mask, entry >> _S32, entry & _POSITION_MASK, False)
