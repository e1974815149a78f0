"""Prompt lookup: what followed the last time that the request's text stood where it stands now.

LLMA ("Inference with Reference", arXiv 2304.04487), prompt lookup decoding, TensorRT-LLM's NGram:
the last few tokens are searched in the request's own prompt and output, and what followed them
there is the draft. TensorRT-LLM's pool of (pattern, continuation) pairs is left out: within one
request's text a pool holds only what a search of that text finds as well.
"""

from __future__ import annotations

from typing import Self

import numpy as np

from specserve.core.compile import kernel_array
from specserve.core.source_config import NgramConfig
from specserve.core.types import Draft, DraftBatch, Int32Array
from specserve.proposers.base import SourceContext
from specserve.proposers.ngram_index import Int64Array, UInt64Array, rehash, step_batch

INGEST_TOKENS_PER_STEP = 8192
"""Tokens of long new texts that are indexed in one step over all requests, 1 to 2 ms of work:
longer prompts take several steps, and meanwhile drafts come from the part that is indexed."""

_SMALL_INGEST_TOKENS = 256
"""What a step or a short prompt adds: no other request's long prompt makes it wait."""

_NO_DRAFT = Draft((), "ngram")
_FIRST_CAPACITY = 256
_FIRST_ROWS = 64


class NgramProposer:
    """Drafts by copying from the request's own prompt and output.

    The longest suffix of ``min_matching_ngram_size`` .. ``max_matching_ngram_size`` tokens that
    occurred before is taken, at its newest (or oldest) place. The index of a request grows by the
    tokens of each step, so that a step's cost does not depend on the context's length. Memory a
    request: 16 to 32 bytes a token and n-gram size, until :meth:`forget`.

    A draft that reaches the text's end goes on with its own tokens: a match ``d`` tokens before
    the end says that the text repeats itself with period ``d``, and the period is then the best
    guess. Cut at the end instead, a run of one token would get drafts of one token.
    """

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._num_sizes = config.max_matching_ngram_size - config.min_matching_ngram_size + 1
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(_FIRST_ROWS - 1, -1, -1))
        self._tables: list[UInt64Array | None] = [None] * _FIRST_ROWS
        self._addresses = np.zeros(_FIRST_ROWS, np.int64)
        self._capacities = np.zeros(_FIRST_ROWS, np.int64)
        self._indexed = np.zeros(_FIRST_ROWS, np.int64)
        self._states = np.zeros(config.max_matching_ngram_size, np.uint64)
        self.warm_up()

    @classmethod
    def build(cls, config: NgramConfig, context: SourceContext) -> Self:
        """For the registry; the request's own text is all that this source needs."""
        del context
        return cls(config)

    @property
    def num_bytes(self) -> int:
        """Memory of all indexes."""
        return sum(table.nbytes for table in self._tables if table is not None)

    def num_unindexed_tokens(self, batch: DraftBatch) -> int:
        """Tokens of the batch that later steps will index."""
        rows = (self._rows.get(request_id) for request_id in batch.request_ids)
        known = [0 if row is None else int(self._indexed[row]) for row in rows]
        ends = (batch.num_tokens - 1).clip(0).tolist()
        return sum(end - count for end, count in zip(ends, known, strict=True))

    def warm_up(self) -> None:
        """Compiles the kernels, or loads them from numba's cache: no request waits for that."""
        length = 3 * _FIRST_CAPACITY
        for tokens in (np.zeros((1, 8), np.int32), np.zeros((1, length), np.int32)):
            one = np.ones(1, np.int32)
            self.propose(DraftBatch(["\0warm-up"], tokens, one * tokens.shape[1], one, one))
        self.forget(["\0warm-up"])

    def propose(self, batch: DraftBatch) -> list[Draft]:
        """Searches each request's text for its own last tokens; indexes what is new in it.

        A request in prefill may be in the batch with ``max_draft_tokens`` 0, so that its prompt is
        indexed by the time it decodes.
        """
        num_requests = len(batch)
        if not num_requests:
            return []
        rows = np.array([self._row_of(request_id) for request_id in batch.request_ids], np.int64)
        token_ids = kernel_array(batch.token_ids, np.int32)
        num_tokens = kernel_array(batch.num_tokens, np.int32)
        targets = self._targets(rows, num_tokens)
        self._make_room(rows, targets, num_tokens)
        limits = np.minimum(batch.max_draft_tokens, self._config.max_draft_len, dtype=np.int32)
        drafts = np.empty((num_requests, max(int(limits.max()), 1)), np.int32)
        lengths = np.empty(num_requests, np.int64)
        sizes = np.empty(num_requests, np.int64)
        step_batch(
            token_ids,
            num_tokens,
            limits,
            rows,
            self._addresses,
            self._capacities,
            self._indexed,
            targets,
            self._config.min_matching_ngram_size,
            self._config.max_matching_ngram_size,
            self._config.use_oldest,
            self._states,
            drafts,
            lengths,
            sizes,
        )
        return [
            Draft(tuple(tokens[:length]), "ngram", size) if length else _NO_DRAFT
            for tokens, length, size in zip(
                drafts.tolist(), lengths.tolist(), sizes.tolist(), strict=True
            )
        ]

    def forget(self, request_ids: list[str]) -> None:
        """Frees the indexes of these requests."""
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._tables[row] = None
                self._addresses[row] = self._capacities[row] = self._indexed[row] = 0
                self._free_rows.append(row)

    def _row_of(self, request_id: str) -> int:
        row = self._rows.get(request_id)
        if row is None:
            if not self._free_rows:
                self._add_rows()
            row = self._rows[request_id] = self._free_rows.pop()
        return row

    def _add_rows(self) -> None:
        count = len(self._tables)
        self._free_rows.extend(range(2 * count - 1, count - 1, -1))
        self._tables.extend([None] * count)
        self._addresses, self._capacities, self._indexed = (
            np.concatenate([old, np.zeros(count, np.int64)])
            for old in (self._addresses, self._capacities, self._indexed)
        )

    def _targets(self, rows: Int64Array, num_tokens: Int32Array) -> Int64Array:
        """Up to where each text is indexed in this step.

        The last position stays out: nothing follows it yet, and it is what is looked up.
        """
        ends = num_tokens.astype(np.int64) - 1
        missing = ends - self._indexed[rows]
        if missing.min() < 0:
            # The text became shorter: it is another one, and the index starts again.
            for row in rows[missing < 0].tolist():
                self._tables[row] = None
                self._addresses[row] = self._capacities[row] = self._indexed[row] = 0
            missing = ends - self._indexed[rows]
        if missing.max() > _SMALL_INGEST_TOKENS:
            left = INGEST_TOKENS_PER_STEP
            for i in np.flatnonzero(missing > _SMALL_INGEST_TOKENS).tolist():
                missing[i] = min(int(missing[i]), left)
                left -= int(missing[i])
        return self._indexed[rows] + missing

    def _make_room(self, rows: Int64Array, targets: Int64Array, num_tokens: Int32Array) -> None:
        """Enlarges the tables of those requests that need it in this step.

        A new request's are made for its whole prompt and a good part of its output.
        """
        small = 2 * targets + 2 > self._capacities[rows]
        if not small.any():
            return
        for i in np.flatnonzero(small).tolist():
            row = int(rows[i])
            old_table, old_capacity = self._tables[row], int(self._capacities[row])
            slots = max(2 * int(num_tokens[i]) + 2, _FIRST_CAPACITY, 2 * old_capacity)
            capacity = 1 << (slots - 1).bit_length()
            table = np.zeros(self._num_sizes * capacity, np.uint64)
            if old_table is not None:
                rehash(old_table, old_capacity, table, capacity, self._num_sizes)
            self._tables[row] = table
            self._addresses[row] = table.ctypes.data
            self._capacities[row] = capacity
