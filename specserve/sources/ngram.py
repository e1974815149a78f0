"""Prompt lookup: drafts what most often followed the last tokens in the request's own text.

As in LLMA ("Inference with Reference", arXiv 2304.04487) and prompt lookup decoding, the last
tokens are searched in the request's prompt and output. Each token of a draft is looked up: it is
the one that most often followed the longest n-gram that occurred before, as in llama.cpp's lookup
decoding. So all places of an n-gram vote. The count is approximate, as an entry keeps one token and
the number of all others.

Each request has one hash table for its n-grams of all sizes. It uses open addressing with linear
probing and is at most three quarters full. An entry has a tag, which is the n-gram's hash (upper 34
bits), how often other tokens followed and how often this one did (3 bits each), and the token
(lower 24 bits); 0 is a free slot. n-grams with equal tags share an entry. This may give a wrong
draft, which verification rejects. The kernels are compiled by Numba and run without the interpreter
lock.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from specserve.core.compile import direct, inner, kernel
from specserve.core.source_config import NgramConfig
from specserve.core.types import (
    DraftBatch,
    Drafts,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.sources.base import SourceContext
from specserve.sources.controls import wants_drafts
from specserve.trie.contexts import MULTIPLIER, ONE, mix, prefetch

UInt64Array = npt.NDArray[np.uint64]

INGEST_TOKENS_PER_STEP = 8192
"""Most tokens of long new texts indexed in one step, over all requests: 1 to 2 ms. A longer prompt
takes several steps. Until then drafts come from the indexed part."""

MAX_VOTES = 7
"""More votes of an n-gram are halved, so that newer ones count more."""

MIN_CONFIDENCE = 0.05
"""A draft ends where the product of its tokens' confidences is lower."""

_SMALL_INGEST_TOKENS = 256
"""A text with at most so many new tokens is always indexed at once, outside that budget."""

_MIN_CAPACITY = 256
_CHUNK = 64
"""Votes whose entries are prefetched together before they are written, so that cache misses
overlap."""

_NGRAM, _FOLLOWING, _ROW = range(3)
"""Rows of a chunk of votes: the n-gram's tag, the token that followed, the row of the batch."""

_GROUP = 16
"""Requests whose entries are prefetched together before they are read."""

_TAG, _MISSES, _HITS = np.uint64(30), np.uint64(27), np.uint64(24)  # first bits of an entry's parts
_COUNT, _TOKEN = np.uint64(0x7), np.uint64(0xFFFFFF)  # masks

_ADDRESS, _CAPACITY, _INDEXED, _TARGET, _NUM_COLUMNS = range(5)
"""Columns of a request: address of its table, slots of the table, tokens indexed before and after
this step."""

_NO_INDEX = -1
"""In place of the tokens indexed: the request takes no drafts of this source."""


class NgramSource:
    """Drafts what followed the last tokens in the request's own prompt and output.

    The first size of n-grams is ``min_matching_ngram_size``. Each size is twice the one before it,
    and the last is ``max_matching_ngram_size``. Each step indexes only new tokens, so its cost does
    not depend on the context's length. Memory per request: 11 to 32 bytes a token and size, until
    :meth:`close`.
    """

    def __init__(self, config: NgramConfig, context: SourceContext) -> None:
        self._kind, num_slots = config.kind, context.num_slots
        self._tables: list[UInt64Array | None] = [None] * num_slots
        self._requests: Int64Array = np.zeros((num_slots, _NUM_COLUMNS), np.int64)
        self._sizes = _sizes(config.min_matching_ngram_size, config.max_matching_ngram_size)
        # A hash that nobody can predict, or a prompt could put all its n-grams beside each other.
        self._options = self._sizes, INGEST_TOKENS_PER_STEP, np.uint64(secrets.randbits(64))
        tags = np.zeros((_GROUP, len(self._sizes)), np.uint64)
        chunk, active = np.zeros((3, _CHUNK), np.uint64), np.zeros(_GROUP, np.int64)
        self._scratch = chunk, tags, active, np.zeros(_GROUP)
        batch, drafts = DraftBatch.empty(), Drafts.empty(0, 1)
        limits = batch.num_tokens
        of_step = batch[:3], limits, self._requests, self._options, self._scratch, drafts
        self._step = direct(step_batch, *of_step)
        self._rehash = direct(rehash, tags[0], tags[0])

    def open(self, slot: int, controls: RequestControls) -> None:
        """Notes whether :meth:`propose` is to make an index."""
        self._requests[slot, _INDEXED] = 0 if wants_drafts(controls, self._kind) else _NO_INDEX

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        """Indexes each request's new tokens and looks up its last ones.

        A request in prefill may be in the batch with a limit of 0. Its prompt is then indexed
        before it decodes.
        """
        of_step = batch[:3], limits, self._requests, self._options, self._scratch, drafts
        while (row := self._step(*of_step)) >= 0:
            self._make_room(int(batch.slots[row]), int(batch.num_tokens[row]))

    def close(self, slots: Int64Array) -> None:
        """Frees the indexes of these requests."""
        for slot in slots.tolist():
            self._tables[slot] = None
        self._requests[slots] = 0

    def _make_room(self, slot: int, num_tokens: int) -> None:
        """Allocates a larger table for a request, with room for all of its tokens.

        If the text became shorter, it is a different one: its index is dropped first.
        """
        request = self._requests[slot]
        if num_tokens < request[_INDEXED]:
            self.close(np.array([slot]))
        entries = max(2 * len(self._sizes) * num_tokens, 2 * int(request[_CAPACITY]), _MIN_CAPACITY)
        table = np.zeros(1 << (entries - 1).bit_length(), np.uint64)
        if (old := self._tables[slot]) is not None:
            self._rehash(old, table)
        self._tables[slot] = table
        request[_ADDRESS], request[_CAPACITY] = table.ctypes.data, len(table)


def _sizes(smallest: int, largest: int) -> Int64Array:
    """Sizes of n-grams, each twice the one before it, up to the largest."""
    sizes = [smallest]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return np.array(sizes)


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
def _slot_of(table, tag):  # type: ignore[no-untyped-def]
    """Slot of the n-gram's entry, or the free one where it belongs."""
    mask = np.uint64(table.shape[0] - 1)
    slot = tag & mask
    while table[slot] != 0 and table[slot] >> _TAG != tag:
        slot = (slot + ONE) & mask
    return slot


@inner
def _vote(table, tag, token):  # type: ignore[no-untyped-def]
    """Records that ``token``, a uint64, followed an n-gram once more.

    It takes the place of the entry's token if other tokens have followed as often as that one.
    """
    slot = _slot_of(table, tag)
    entry = table[slot]
    hits, misses = (entry >> _HITS) & _COUNT, (entry >> _MISSES) & _COUNT
    if entry == 0 or entry & _TOKEN == token:
        hits += ONE
    elif misses < hits:
        misses, token = misses + ONE, entry & _TOKEN
    else:
        hits, misses = ONE, hits
    if hits + misses > MAX_VOTES:
        hits, misses = (hits + ONE) >> ONE, misses >> ONE
    table[slot] = tag << _TAG | misses << _MISSES | hits << _HITS | token


@inner
def _record(chunk, count, slots, requests):  # type: ignore[no-untyped-def]
    """Records the first ``count`` votes of a chunk."""
    for k in range(count):
        request = requests[slots[np.int64(chunk[_ROW, k])]]
        table = array_at(request[_ADDRESS], request[_CAPACITY])
        _vote(table, chunk[_NGRAM, k], chunk[_FOLLOWING, k])


@inner
def _end_tags(table, text, length, draft, j, sizes, seed, tags):  # type: ignore[no-untyped-def]
    """Writes the tags of the n-grams at the end of ``text[:length]`` and ``draft[:j]``, by size; 0
    for those longer than that. Prefetches their entries."""
    state, known = seed, 0
    for level in range(sizes.shape[0]):
        tags[level] = 0
        if sizes[level] <= length + j:
            while known < sizes[level]:
                known += 1
                token = draft[j - known] if known <= j else text[length + j - known]
                state = _extend(state, token)
            tags[level] = mix(state) >> _TAG
            prefetch(table, np.int64(tags[level] & np.uint64(table.shape[0] - 1)))


@inner
def _ingest(batch, row, requests, sizes, seed, tags, chunk, count):  # type: ignore[no-untyped-def]
    """Adds the votes of a request's new tokens to a chunk of ``count`` votes; records full chunks.

    Returns:
        Number of votes in the chunk that are not recorded yet.
    """
    slots, token_ids, _ = batch
    text, request = token_ids[row], requests[slots[row]]
    table = array_at(request[_ADDRESS], request[_CAPACITY])
    for position in range(request[_INDEXED], request[_TARGET]):
        _end_tags(table, text, position, text, 0, sizes, seed, tags)
        for level in range(sizes.shape[0]):
            if tags[level] == 0:
                continue
            chunk[_NGRAM, count], chunk[_ROW, count] = tags[level], np.uint64(row)
            chunk[_FOLLOWING, count] = np.uint64(text[position]) & _TOKEN
            count += 1
            if count == chunk.shape[1]:
                _record(chunk, count, slots, requests)
                count = 0
    request[_INDEXED] = request[_TARGET]
    return count


@inner
def _longest(table, sizes, tags):  # type: ignore[no-untyped-def]
    """Entry and size of the longest n-gram that the table has; (0, 0): it has none.

    A tag of 0 stands for an n-gram longer than the text, so one with that hash is never found.
    """
    for level in range(sizes.shape[0] - 1, -1, -1):
        entry = table[_slot_of(table, tags[level])]
        if entry != 0 and tags[level] != 0:
            return entry, sizes[level]
    return np.uint64(0), 0


@inner
def _draft(batch, begin, end, limits, requests, sizes, seed, scratch, drafts):  # type: ignore[no-untyped-def]
    """Writes the drafts of rows ``begin .. end - 1``, in turn a token of each."""
    slots, token_ids, num_tokens = batch
    _, tags, active, products = scratch
    num_active, j = 0, 0
    for row in range(begin, end):
        if limits[row] > 0:
            active[num_active], products[row - begin] = row, 1.0
            num_active += 1
    while num_active:
        for k in range(num_active):
            row = active[k]
            table = array_at(requests[slots[row], _ADDRESS], requests[slots[row], _CAPACITY])
            text, draft = token_ids[row], drafts.tokens[slots[row]]
            _end_tags(table, text, num_tokens[row], draft, j, sizes, seed, tags[row - begin])
        left = 0
        for k in range(num_active):
            row, slot = active[k], slots[active[k]]
            table = array_at(requests[slot, _ADDRESS], requests[slot, _CAPACITY])
            entry, size = _longest(table, sizes, tags[row - begin])
            if entry == 0:
                continue
            hits, misses = (entry >> _HITS) & _COUNT, (entry >> _MISSES) & _COUNT
            confidence = hits / (hits + misses + 1.0 / size)
            products[row - begin] *= confidence
            if products[row - begin] < MIN_CONFIDENCE:
                continue
            drafts.tokens[slot, j], drafts.confidence[slot, j] = entry & _TOKEN, confidence
            drafts.lengths[slot] = j + 1
            if j + 1 < limits[row]:
                active[left] = row
                left += 1
        num_active, j = left, j + 1


@inner
def _plan_ingest(num_tokens, slots, requests, num_sizes, budget):  # type: ignore[no-untyped-def]
    """Plans up to where to index each text; returns the first row without room for that, or -1."""
    for row in range(slots.shape[0]):
        request = requests[slots[row]]
        if request[_INDEXED] == _NO_INDEX:
            request[_TARGET] = _NO_INDEX
            continue
        missing = num_tokens[row] - request[_INDEXED]
        if missing > _SMALL_INGEST_TOKENS:
            missing = min(missing, budget)
            budget -= missing
        request[_TARGET] = request[_INDEXED] + missing
        if missing < 0 or 4 * num_sizes * max(request[_TARGET], 1) > 3 * request[_CAPACITY]:
            return row  # a text that became shorter is another one
    return -1


@kernel
def step_batch(batch, limits, requests, options, scratch, drafts):  # type: ignore[no-untyped-def]
    """One decoding step of the batch: indexes new tokens and looks up the last ones.

    Args:
        batch: the first three arrays of a :class:`specserve.core.types.DraftBatch`.
        limits: int32 ``[n]``, longest draft.
        requests: int64 ``[slots, _NUM_COLUMNS]``; updated.
        options: int64 ``[sizes]``, rising sizes of n-grams; most tokens of long new texts to index;
            uint64, first state of the hash.
        scratch: votes, uint64 ``[3, _CHUNK]``; tags, uint64 ``[_GROUP, sizes]``; rows that still
            draft, int64 ``[_GROUP]``; products of their confidences, float64 ``[_GROUP]``.
        drafts: all of length 0; all but the labels is written.

    Returns:
        -1, or the row of a request that needs a larger table; then no draft was made.
    """
    slots, _, num_tokens = batch
    sizes, budget, seed = options
    chunk, tags = scratch[:2]
    row = _plan_ingest(num_tokens, slots, requests, sizes.shape[0], budget)
    if row >= 0:
        return row
    for begin in range(0, slots.shape[0], _GROUP):
        end = min(begin + _GROUP, slots.shape[0])
        count = 0
        for i in range(begin, end):
            count = _ingest(batch, i, requests, sizes, seed, tags[0], chunk, count)
        _record(chunk, count, slots, requests)
        _draft(batch, begin, end, limits, requests, sizes, seed, scratch, drafts)
    return -1


@kernel
def rehash(old, new):  # type: ignore[no-untyped-def]
    """Copies all entries into a larger table."""
    for slot in range(old.shape[0]):
        if old[slot] != 0:
            new[_slot_of(new, old[slot] >> _TAG)] = old[slot]
