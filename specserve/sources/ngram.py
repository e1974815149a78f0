"""Prompt lookup: what followed the last time that the request's text stood where it stands now.

LLMA ("Inference with Reference", arXiv 2304.04487), prompt lookup decoding, TensorRT-LLM's NGram:
the last few tokens are searched in the request's own prompt and output, and what followed them
there is the draft. TensorRT-LLM's pool of (pattern, continuation) pairs is left out: within one
request's text a pool holds only what a search of that text finds as well.

The index of a growing text says for the last 1 .. 16 tokens where they stood before: Numba kernels
over flat arrays, without the interpreter lock. One table a request and n-gram size; an entry packs
the n-gram's hash (upper 32 bits) and the position after it (lower 32 bits), 0 is a free slot.
Tables are open-addressed with linear probing and at most half full. Different n-grams of one hash
share an entry (once in 2**32): a lookup compares the tokens themselves, so that such a pair may
hide a match but never makes a wrong one.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt
from numba import carray, njit, types
from numba.extending import intrinsic

from specserve.core.compile import kernel, kernel_array
from specserve.core.source_config import NgramConfig
from specserve.core.types import DraftBatch, Drafts, Int32Array, Int64Array, RequestControls
from specserve.sources.base import SourceContext

UInt64Array = npt.NDArray[np.uint64]

INGEST_TOKENS_PER_STEP = 8192
"""Tokens of long new texts that are indexed in one step over all requests, 1 to 2 ms of work:
longer prompts take several steps, and meanwhile drafts come from the part that is indexed."""

_SMALL_INGEST_TOKENS = 256
"""What a step or a short prompt adds: no other request's long prompt makes it wait."""

_FIRST_CAPACITY = 256
DOUBT = 8.0
"""A match of ``m`` tokens is right with a confidence of ``m^2 / (m^2 + 8)``, as in
:mod:`specserve.trie.branch`; each token that is right makes the match longer."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FINALIZER = np.uint64(0xD6E8FEB86659FD93)
_POSITION_MASK = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_S29 = np.uint64(29)
_ONE = np.uint64(1)


class NgramSource:
    """Drafts by copying from the request's own prompt and output.

    The longest suffix of ``min_matching_ngram_size`` .. ``max_matching_ngram_size`` tokens that
    occurred before is taken, at its newest (or oldest) place. The index of a request grows by the
    tokens of each step, so that a step's cost does not depend on the context's length. Memory a
    request: 16 to 32 bytes a token and n-gram size, until :meth:`close`.

    A draft that reaches the text's end goes on with its own tokens: a match ``d`` tokens before
    the end says that the text repeats itself with period ``d``, and the period is then the best
    guess. Cut at the end instead, a run of one token would get drafts of one token.
    """

    def __init__(self, config: NgramConfig, num_slots: int) -> None:
        self._config = config
        self._num_sizes = config.max_matching_ngram_size - config.min_matching_ngram_size + 1
        self._tables: list[UInt64Array | None] = [None] * num_slots
        self._addresses = np.zeros(num_slots, np.int64)
        self._capacities = np.zeros(num_slots, np.int64)
        self._indexed = np.zeros(num_slots, np.int64)
        self._states = np.zeros(config.max_matching_ngram_size, np.uint64)
        self._drafts = Drafts.empty(num_slots, config.max_draft_len)
        self.warm_up()

    @classmethod
    def build(cls, config: NgramConfig, context: SourceContext) -> Self:
        """For the registry; the request's own text is all that this source needs."""
        return cls(config, context.num_slots)

    @property
    def num_bytes(self) -> int:
        """Memory of all indexes."""
        return sum(table.nbytes for table in self._tables if table is not None)

    def num_unindexed_tokens(self, batch: DraftBatch) -> int:
        """Tokens of the batch that later steps will index."""
        return int(((batch.num_tokens - 1).clip(0) - self._indexed[batch.slots]).sum())

    def warm_up(self) -> None:
        """Compiles the kernels, or loads them from numba's cache: no request waits for that."""
        length = 3 * _FIRST_CAPACITY
        one = np.ones(1, np.int32)
        for tokens in (np.zeros((1, 8), np.int32), np.zeros((1, length), np.int32)):
            batch = DraftBatch(np.zeros(1, np.int64), tokens, one * tokens.shape[1], one)
            self.propose(batch, one)
        self.close(np.zeros(1, np.int64))

    def open(self, slot: int, controls: RequestControls) -> None:
        """Nothing to do: the index begins with the first tokens."""

    def propose(self, batch: DraftBatch, limits: Int32Array) -> Drafts:
        """Searches each request's text for its own last tokens; indexes what is new in it.

        A request in prefill may be in the batch with a limit of 0, so that its prompt is indexed by
        the time it decodes.
        """
        num_requests = len(batch.slots)
        slots = kernel_array(batch.slots, np.int64)
        token_ids = kernel_array(batch.token_ids, np.int32)
        num_tokens = kernel_array(batch.num_tokens, np.int32)
        drafts = self._drafts.first(num_requests)
        if not num_requests:
            return drafts
        targets = self._targets(slots, num_tokens)
        self._make_room(slots, targets, num_tokens)
        step_batch(
            token_ids,
            num_tokens,
            kernel_array(limits, np.int32),
            slots,
            self._addresses,
            self._capacities,
            self._indexed,
            targets,
            self._config.min_matching_ngram_size,
            self._config.max_matching_ngram_size,
            self._config.use_oldest,
            self._states,
            drafts.tokens,
            drafts.lengths,
            drafts.confidence,
        )
        return drafts

    def close(self, slots: Int64Array) -> None:
        """Frees the indexes of these requests."""
        for slot in slots.tolist():
            self._tables[slot] = None
        self._addresses[slots] = self._capacities[slots] = self._indexed[slots] = 0

    def _targets(self, slots: Int64Array, num_tokens: Int32Array) -> Int64Array:
        """Up to where each text is indexed in this step.

        The last position stays out: nothing follows it yet, and it is what is looked up.
        """
        ends = num_tokens.astype(np.int64) - 1
        missing = ends - self._indexed[slots]
        if missing.min() < 0:
            # The text became shorter: it is another one, and the index starts again.
            self.close(slots[missing < 0])
            missing = ends - self._indexed[slots]
        if missing.max() > _SMALL_INGEST_TOKENS:
            left = INGEST_TOKENS_PER_STEP
            for i in np.flatnonzero(missing > _SMALL_INGEST_TOKENS).tolist():
                missing[i] = min(int(missing[i]), left)
                left -= int(missing[i])
        return self._indexed[slots] + missing

    def _make_room(self, slots: Int64Array, targets: Int64Array, num_tokens: Int32Array) -> None:
        """Enlarges the tables of those requests that need it in this step.

        A new request's are made for its whole prompt and a good part of its output.
        """
        small = 2 * targets + 2 > self._capacities[slots]
        if not small.any():
            return
        for i in np.flatnonzero(small).tolist():
            slot = int(slots[i])
            old_table, old_capacity = self._tables[slot], int(self._capacities[slot])
            entries = max(2 * int(num_tokens[i]) + 2, _FIRST_CAPACITY, 2 * old_capacity)
            capacity = 1 << (entries - 1).bit_length()
            table = np.zeros(self._num_sizes * capacity, np.uint64)
            if old_table is not None:
                rehash(old_table, old_capacity, table, capacity, self._num_sizes)
            self._tables[slot] = table
            self._addresses[slot] = table.ctypes.data
            self._capacities[slot] = capacity


@intrinsic
def as_pointer(typing_context, address):  # type: ignore[no-untyped-def]
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
    slots,
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
    confidence,
):
    """One decoding step of the batch: index what is new, look up, copy.

    Args:
        token_ids: int32 ``[n, >= max(num_tokens)]``.
        num_tokens: int32 ``[n]``.
        limits: int32 ``[n]``, longest draft.
        slots: int64 ``[n]``, each request's entry in the three arrays that follow.
        addresses: int64, of each request's tables.
        capacities: int64, slots of one table of each request.
        indexed: int64, positions indexed so far; updated.
        targets: int64 ``[n]``, up to where to index in this step, less than ``num_tokens``.
        min_size: shortest n-gram.
        max_size: longest n-gram.
        keep_oldest: of equal n-grams keep the oldest place, not the newest.
        states: uint64 ``[max_size]``, scratch.
        drafts: int32 ``[n, >= max(limits)]``, written.
        lengths: int32 ``[n]``, tokens in each draft, written.
        confidence: float32 ``[n, >= max(limits)]``, written.
    """
    num_sizes = max_size - min_size + 1
    for i in range(slots.shape[0]):
        slot = slots[i]
        text = token_ids[i]
        length = np.int64(num_tokens[i])
        capacity = capacities[slot]
        table = carray(as_pointer(addresses[slot]), num_sizes * capacity)
        if targets[i] > indexed[slot]:
            begin = indexed[slot]
            ingest(table, capacity, text, begin, targets[i], min_size, max_size, keep_oldest)
            indexed[slot] = targets[i]
        limit = min(limits[i], drafts.shape[1])
        lengths[i] = 0
        if limit > 0:
            position, size = find(table, capacity, text, length, min_size, max_size, states)
            if size > 0:
                copy_from(text, length, position, limit, drafts[i])
                lengths[i] = limit
                for j in range(limit):
                    matched = float(size + j) ** 2
                    confidence[i, j] = matched / (matched + DOUBT)


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
