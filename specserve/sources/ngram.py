"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last few tokens.

The last tokens are searched in the request's own prompt and output, as in LLMA ("Inference with
Reference", arXiv 2304.04487), prompt lookup decoding and TensorRT-LLM's NGram.

Each request has one hash table per configured n-gram size. An entry packs the n-gram's hash (upper
32 bits) and the position after it (lower 32 bits); 0 is a free slot. The tables use open addressing
with linear probing and are at most half full. n-grams with equal hashes (1 pair in 2**32) share an
entry. A lookup compares the tokens, so a collision can hide a match but never gives a wrong one.
The kernels are compiled by Numba and run without the interpreter lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from specserve.core.compile import direct, inner, kernel
from specserve.core.source_config import NgramConfig
from specserve.core.types import (
    DraftBatch,
    DraftBuffer,
    Drafts,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.sources.base import SourceContext
from specserve.trie.contexts import MULTIPLIER, ONE, mix, prefetch

UInt64Array = npt.NDArray[np.uint64]

INGEST_TOKENS_PER_STEP = 8192
"""Most tokens of long new texts indexed in one step, over all requests: 1 to 2 ms. A longer prompt
takes several steps. Until then drafts come from the indexed part."""

_SMALL_INGEST_TOKENS = 256
"""A text with at most so many new tokens is always indexed at once, outside that budget."""

_FIRST_CAPACITY = 256
_CHUNK = 64
"""Entries that are prefetched together before they are written, so that cache misses overlap."""

_GROUP = 16
"""Requests whose entries are prefetched together before they are read."""

_DOUBT = 8.0
"""The confidence after a match of ``m`` tokens is ``m^2 / (m^2 + 8)``. Each draft token makes the
match one token longer."""

_POSITION_MASK = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)

_ADDRESS, _CAPACITY, _INDEXED, _TARGET, _NUM_COLUMNS = range(5)
"""Columns of a request: address of its tables, slots of each table, positions indexed before
and after this step. The last position is not indexed, as nothing follows it yet."""


class NgramSource:
    """Drafts by copying from the request's own prompt and output.

    The longest suffix of ``min_matching_ngram_size`` .. ``max_matching_ngram_size`` tokens that
    occurred before wins, at its newest (or oldest) place. Each step indexes only new tokens, so its
    cost does not depend on the context's length. Memory per request: 16 to 32 bytes a token and
    n-gram size, until :meth:`close`.

    A draft that reaches the text's end continues with its own tokens. A match ``d`` tokens before
    the end means that the text repeats with period ``d``, so the draft repeats that period.
    """

    def __init__(self, config: NgramConfig, context: SourceContext) -> None:
        num_slots = context.num_slots
        self._tables: list[UInt64Array | None] = [None] * num_slots
        self._requests: Int64Array = np.zeros((num_slots, _NUM_COLUMNS), np.int64)
        chunk = np.zeros((2, _CHUNK), np.uint64)
        self._scratch = chunk, np.zeros((_GROUP, config.max_matching_ngram_size), np.uint64)
        self._sizes = config.min_matching_ngram_size, config.max_matching_ngram_size
        self._drafts = DraftBuffer(num_slots, config.max_draft_len)
        self._options = self._sizes, config.use_oldest, INGEST_TOKENS_PER_STEP
        batch, drafts = DraftBatch.empty(), self._drafts.rows(0)
        limits = batch.num_tokens
        of_step = batch[:3], limits, self._requests, self._options, self._scratch, drafts
        self._step = direct(step_batch, *of_step)
        self._rehash = direct(rehash, chunk[0], 1, chunk[0], 1, 1)

    @property
    def num_bytes(self) -> int:
        """Memory of all indexes."""
        return sum(table.nbytes for table in self._tables if table is not None)

    def open(self, slot: int, controls: RequestControls) -> None:
        """Does nothing; :meth:`propose` makes the index."""

    def propose(self, batch: DraftBatch, limits: Int32Array) -> Drafts:
        """Indexes each request's new tokens and searches its text for the last tokens.

        A request in prefill may be in the batch with a limit of 0. Its prompt is then indexed
        before it decodes.
        """
        drafts = self._drafts.rows(len(limits))
        of_step = batch[:3], limits, self._requests, self._options, self._scratch, drafts
        while True:
            row = self._step(*of_step)
            if row < 0:
                return drafts
            self._make_room(int(batch.slots[row]), int(batch.num_tokens[row]))

    def close(self, slots: Int64Array) -> None:
        """Frees the indexes of these requests."""
        for slot in slots.tolist():
            self._tables[slot] = None
        self._requests[slots] = 0

    def _make_room(self, slot: int, num_tokens: int) -> None:
        """Allocates larger tables for a request, with room for all of its tokens.

        If the text became shorter, it is a different one: its index is dropped first.
        """
        request = self._requests[slot]
        if num_tokens <= request[_INDEXED]:
            self.close(np.array([slot]))
        old_table, old_capacity = self._tables[slot], int(request[_CAPACITY])
        entries = max(2 * num_tokens + 2, _FIRST_CAPACITY, 2 * old_capacity)
        capacity = 1 << (entries - 1).bit_length()
        low, high = self._sizes
        table = np.zeros((high - low + 1) * capacity, np.uint64)
        if old_table is not None:
            self._rehash(old_table, old_capacity, table, capacity, high - low + 1)
        self._tables[slot] = table
        request[_ADDRESS], request[_CAPACITY] = table.ctypes.data, capacity


@intrinsic
def array_at(typing_context, address, size):  # type: ignore[no-untyped-def]
    """uint64 ``[size]`` at an address; one compiled call can so take any number of arrays."""
    array = types.Array(types.uint64, 1, "C")

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        made = context.make_array(array)(context, builder)
        num_bytes = context.get_constant(types.intp, 8)
        populate_array(
            made,
            data=builder.inttoptr(arguments[0], made.data.type),
            shape=[arguments[1]],
            strides=[num_bytes],
            itemsize=num_bytes,
            meminfo=None,
        )
        return made._getvalue()

    return array(types.int64, types.int64), codegen


@inner
def _extend(state: np.uint64, token: np.int32) -> np.uint64:
    """Hash state of the n-gram extended by the token before it."""
    return (state ^ (np.uint64(token) + ONE)) * MULTIPLIER


@inner
def _put(table, start, mask, tag, position, keep_oldest):  # type: ignore[no-untyped-def]
    """Stores ``position`` under ``tag``; with ``keep_oldest`` an existing entry stays."""
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
        slot = (slot + ONE) & mask


@inner
def _get(table, start, mask, tag):  # type: ignore[no-untyped-def]
    """The position stored under ``tag``; 0: none."""
    slot = tag & mask
    while True:
        entry = table[start + slot]
        if entry == 0:
            return 0
        if entry >> _S32 == tag:
            return np.int64(entry & _POSITION_MASK)
        slot = (slot + ONE) & mask


@inner
def _ingest(table, capacity, text, begin, end, sizes, keep_oldest, chunk):  # type: ignore[no-untyped-def]
    """Indexes the n-grams that end at positions ``begin + 1 .. end`` of ``text``."""
    (low, high), mask = sizes, np.uint64(capacity - 1)
    tags, positions = chunk[0], chunk[1]
    count = 0
    for position in range(begin + 1, end + 1):
        state = np.uint64(0)
        for size in range(1, min(high, position) + 1):
            state = _extend(state, text[position - size])
            if size >= low:
                tag, start = mix(state) >> _S32, (size - low) * capacity
                prefetch(table, start + np.int64(tag & mask))
                tags[count] = tag
                positions[count] = (np.uint64(start) << _S32) | np.uint64(position)
                count += 1
                if count == _CHUNK:
                    _put_all(table, mask, tags, positions, count, keep_oldest)
                    count = 0
    _put_all(table, mask, tags, positions, count, keep_oldest)


@inner
def _put_all(table, mask, tags, positions, count, keep_oldest):  # type: ignore[no-untyped-def]
    for i in range(count):
        start, position = positions[i] >> _S32, positions[i] & _POSITION_MASK
        _put(table, start, mask, tags[i], position, keep_oldest)


@inner
def _tags(table, capacity, text, length, sizes, tags):  # type: ignore[no-untyped-def]
    """Writes the tags of the suffixes of ``text[:length]`` by size; prefetches their entries."""
    low, high = sizes
    state = np.uint64(0)
    for size in range(1, min(high, length) + 1):
        state = _extend(state, text[length - size])
        if size >= low:
            tags[size - 1] = mix(state) >> _S32
            start, mask = (size - low) * capacity, np.uint64(capacity - 1)
            prefetch(table, start + np.int64(tags[size - 1] & mask))


@inner
def _find(table, capacity, text, length, sizes, tags):  # type: ignore[no-untyped-def]
    """Finds the stored place of the longest suffix of ``text[:length]`` that occurred before.

    Returns:
        (the position after the match, its size in tokens); (0, 0): none.
    """
    (low, high), mask = sizes, np.uint64(capacity - 1)
    for size in range(min(high, length), low - 1, -1):
        position = _get(table, np.uint64((size - low) * capacity), mask, tags[size - 1])
        if size <= position < length:
            equal = True
            for back in range(1, size + 1):
                if text[position - back] != text[length - back]:
                    equal = False
                    break
            if equal:
                return position, size
    return 0, 0


@inner
def copy_from(text, length, position, size, draft, confidence):  # type: ignore[no-untyped-def]
    """Fills ``draft`` with the tokens from ``position`` on, after a match of ``size`` tokens.

    After the text's end it continues with the draft's own tokens.
    """
    for j in range(draft.shape[0]):
        source = position + j
        draft[j] = text[source] if source < length else draft[source - length]
        matched = float(size + j) ** 2
        confidence[j] = matched / (matched + _DOUBT)


@inner
def _plan_ingest(num_tokens, slots, requests, budget):  # type: ignore[no-untyped-def]
    """Plans up to where to index each text; returns the first row without room for that, or -1."""
    for row in range(slots.shape[0]):
        request = requests[slots[row]]
        end = max(num_tokens[row] - 1, 0)
        missing = end - request[_INDEXED]
        if missing > _SMALL_INGEST_TOKENS:
            missing = min(missing, budget)
            budget -= missing
        request[_TARGET] = request[_INDEXED] + missing
        if missing < 0 or 2 * request[_TARGET] + 2 > request[_CAPACITY]:
            return row
    return -1


@kernel
def step_batch(batch, limits, requests, options, scratch, drafts):  # type: ignore[no-untyped-def]
    """One decoding step of the batch: indexes new tokens, looks up the last ones, copies drafts.

    Args:
        batch: the first three arrays of a :class:`specserve.core.types.DraftBatch`.
        limits: int32 ``[n]``, longest draft.
        requests: int64 ``[slots, _NUM_COLUMNS]``; updated.
        options: sizes of the shortest and of the longest n-gram; whether the oldest place of an
            n-gram is kept; most tokens of long new texts to index.
        scratch: uint64 ``[2, _CHUNK]`` and ``[_GROUP, >= longest]``.
        drafts: of n requests; all but the labels is written.

    Returns:
        -1, or the row of a request that needs larger tables; then no draft was made.
    """
    slots, token_ids, num_tokens = batch
    sizes, keep_oldest, budget = options
    chunk, tags = scratch
    row = _plan_ingest(num_tokens, slots, requests, budget)
    if row >= 0:
        return row
    num_sizes = sizes[1] - sizes[0] + 1
    for begin in range(0, slots.shape[0], _GROUP):
        end = min(begin + _GROUP, slots.shape[0])
        for i in range(begin, end):
            request, text = requests[slots[i]], token_ids[i]
            capacity = request[_CAPACITY]
            table = array_at(request[_ADDRESS], num_sizes * capacity)
            first, last = request[_INDEXED], request[_TARGET]
            _ingest(table, capacity, text, first, last, sizes, keep_oldest, chunk)
            request[_INDEXED] = last
            _tags(table, capacity, text, num_tokens[i], sizes, tags[i - begin])
        for i in range(begin, end):
            text, length, limit = token_ids[i], np.int64(num_tokens[i]), 0
            capacity = requests[slots[i], _CAPACITY]
            table = array_at(requests[slots[i], _ADDRESS], num_sizes * capacity)
            position, size = _find(table, capacity, text, length, sizes, tags[i - begin])
            if size > 0:
                limit = max(min(limits[i], drafts.tokens.shape[1]), 0)
                draft, confidence = drafts.tokens[i, :limit], drafts.confidence[i]
                copy_from(text, length, position, size, draft, confidence)
            drafts.lengths[i] = limit
    return -1


@kernel
def rehash(old, old_capacity, new, new_capacity, num_sizes):  # type: ignore[no-untyped-def]
    """Copies all entries into larger tables."""
    mask = np.uint64(new_capacity - 1)
    for index in range(num_sizes):
        start = np.uint64(index * new_capacity)
        for slot in range(index * old_capacity, (index + 1) * old_capacity):
            entry = old[slot]
            if entry != 0:
                _put(new, start, mask, entry >> _S32, entry & _POSITION_MASK, False)
