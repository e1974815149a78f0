"""One namespace's draft memory: learns token sequences, and drafts what followed before.

Of one family with REST (arXiv 2311.08252), Lookahead's trie (arXiv 2312.12728) and SuffixDecoding
(arXiv 2411.04975): drafts are paths of a trie of earlier texts, taken by the weights of its
branches. Here the trie is never stored. A log of the texts with hashed contexts is, in flat arrays
of a fixed size; the branch below a context is put together when it is looked up, from the newest
places where the context stood.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from specserve.core.compile import kernel_array
from specserve.core.types import Int32Array
from specserve.trie import branch, pages
from specserve.trie.layout import (
    CLOCK,
    CUT,
    FROM_CLUSTER,
    NUM_EVICTED,
    NUM_FREE_SLOTS,
    NUM_TOKENS,
    PRIVATE,
    allocate,
    pages_in,
)

Int64Array = npt.NDArray[np.int64]
LearnedFrom = Literal["local", "cluster"]

LEAST_PAGES = 16
"""Below this a trie forgets a text while it is being learned."""


class TrieDrafts(NamedTuple):
    """Drafts for n requests.

    Attributes:
        tokens: int32 ``[n, longest]``; row i holds ``lengths[i]`` tokens.
        lengths: int64 ``[n]``; 0: no draft.
        match_lens: int64 ``[n]``, tokens of context that the draft rests on.
        chances: float64 ``[n, longest]``, of each token's right, those before it given.
        from_cluster: bool ``[n]``, other replicas taught most of it.
    """

    tokens: Int32Array
    lengths: Int64Array
    match_lens: Int64Array
    chances: npt.NDArray[np.float64]
    from_cluster: npt.NDArray[np.bool_]


class TokenTrie:
    """Learns from many requests' texts. Calls may come from several threads.

    The least used text is forgotten first, 64 tokens at a time, when the memory is full.

    Args:
        max_bytes: memory that is never exceeded, about 65 bytes a token.
        half_life_tokens: tokens learned until a text's weight has halved.
        prompt_weight: weight of what stood in a prompt; 1 is that of an output.
        own_weight: weight of what stood in the request's own text.

    Raises:
        ValueError: ``max_bytes`` is too small.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        half_life_tokens: float = 1e6,
        prompt_weight: float = 0.5,
        own_weight: float = 16.0,
    ) -> None:
        num_pages = pages_in(max_bytes)
        if num_pages < LEAST_PAGES:
            raise ValueError(f"max_bytes: {max_bytes} is too small for {LEAST_PAGES} pages")
        self.max_bytes = max_bytes
        self._arrays = allocate(num_pages)
        self._weights = (float(own_weight), float(prompt_weight), 1 / half_life_tokens)
        self._slots: dict[str, int] = {}
        self._ids: list[str | None] = [None] * num_pages
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """Tokens remembered now."""
        return int(self._arrays.scalars[NUM_TOKENS])

    @property
    def num_ingested_tokens(self) -> int:
        """Tokens learned so far."""
        return int(self._arrays.scalars[CLOCK])

    @property
    def num_evicted_tokens(self) -> int:
        """Tokens forgotten for want of memory so far."""
        return int(self._arrays.scalars[NUM_EVICTED])

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, used or not."""
        return sum(array.nbytes for array in self._arrays)

    def open(
        self, sequence_id: str, *, learned_from: LearnedFrom = "local", private: bool = False
    ) -> bool:
        """Makes ready for a sequence's tokens; one that is known goes on where it ended.

        Args:
            sequence_id: unique among all texts.
            learned_from: whose request it is, this replica's or another one's.
            private: it is drafted from for its own request alone, and forgotten when finished.

        Returns:
            False if there is no room for one more sequence.
        """
        with self._lock:
            arrays = self._arrays
            slot = self._slot_of(sequence_id)
            if slot < 0:
                free = arrays.scalars[NUM_FREE_SLOTS] - 1
                if free < 0:
                    return False
                arrays.scalars[NUM_FREE_SLOTS] = free
                slot = int(arrays.free_slots[free])
                if (former := self._ids[slot]) is not None:
                    self._slots.pop(former, None)
                self._ids[slot] = sequence_id
                self._slots[sequence_id] = slot
                arrays.slot_flags[slot] = (FROM_CLUSTER if learned_from == "cluster" else 0) | (
                    PRIVATE if private else 0
                )
            arrays.slot_open[slot] = True
            return True

    def append(self, sequence_id: str, tokens: Int32Array, *, num_prompt_tokens: int = 0) -> int:
        """Adds tokens to the end of an open sequence.

        Args:
            sequence_id: whose; opened before.
            tokens: int32 ``[k]``.
            num_prompt_tokens: how many of them, from the first one, are prompt.

        Returns:
            How many tokens found no room; no draft runs over the gap.
        """
        return self.append_rows(
            [sequence_id],
            tokens[None],
            np.zeros(1, np.int64),
            np.array([len(tokens)]),
            np.array([num_prompt_tokens]),
        )

    def append_rows(
        self,
        sequence_ids: Sequence[str],
        token_ids: Int32Array,
        begins: Int64Array,
        ends: Int64Array,
        num_prompt_tokens: Int64Array,
    ) -> int:
        """Adds ``token_ids[i, begins[i]:ends[i]]`` to sequence i, for all rows in one call.

        Args:
            sequence_ids: n; a row whose sequence is not open is passed over.
            token_ids: int32 ``[n, columns]``.
            begins: int64 ``[n]``.
            ends: int64 ``[n]``.
            num_prompt_tokens: int64 ``[n]``, columns before this one are prompt.

        Returns:
            How many tokens found no room.
        """
        tokens = kernel_array(token_ids, np.int32)
        bounds = [kernel_array(each, np.int64) for each in (begins, ends, num_prompt_tokens)]
        with self._lock:
            slots = self._slots_of(sequence_ids, must_be_open=True)
            return int(pages.append(self._arrays, slots, tokens, *bounds))

    def skip(self, sequence_id: str) -> None:
        """Says that a part of an open sequence is missing before what is appended next."""
        with self._lock:
            slot = self._slot_of(sequence_id)
            if slot >= 0:
                self._arrays.slot_flags[slot] |= CUT

    def finish(self, sequence_id: str) -> None:
        """Closes a sequence: it may be forgotten now; a private one is, at once."""
        with self._lock:
            slot = self._slot_of(sequence_id)
            if slot < 0:
                return
            arrays = self._arrays
            if arrays.slot_flags[slot] & PRIVATE or arrays.slot_head[slot] < 0:
                pages.remove(arrays, slot)
            arrays.slot_open[slot] = False

    def remove(self, sequence_id: str) -> int:
        """Forgets a sequence; nothing of it is ever drafted again.

        Returns:
            How many tokens were removed; 0 for one that is unknown or long forgotten.
        """
        with self._lock:
            slot = self._slot_of(sequence_id)
            return int(pages.remove(self._arrays, slot)) if slot >= 0 else 0

    def clear(self) -> int:
        """Forgets everything; sequences that still grow are not learned any further.

        Returns:
            How many tokens were removed.
        """
        with self._lock:
            num_tokens = self.num_tokens
            counters = self._arrays.scalars[[CLOCK, NUM_EVICTED]]
            self._arrays = allocate(len(self._ids))
            self._arrays.scalars[[CLOCK, NUM_EVICTED]] = counters
            self._slots.clear()
            self._ids = [None] * len(self._ids)
            return num_tokens

    def lookup(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        max_draft_tokens: Int32Array,
        sequence_ids: Sequence[str],
        *,
        rows: Int64Array | None = None,
        min_match_len: int = 2,
        floor: float = 0.1,
    ) -> TrieDrafts:
        """Drafts what follows each context, in one call.

        Args:
            token_ids: int32 ``[n, >= max(num_tokens)]``; ``[i, :num_tokens[i]]`` is a context.
            num_tokens: int32 ``[n]``.
            max_draft_tokens: int32 ``[n]``, longest drafts; 0: none.
            sequence_ids: n, the requests' own sequences; unknown ones are fine.
            rows: int64, the rows to draft for; None: all of them.
            min_match_len: shortest match, in tokens, at least 2.
            floor: a draft ends before its path's probability falls below this.
        """
        size, longest = len(num_tokens), max(int(max_draft_tokens.max(initial=0)), 1)
        drafts = TrieDrafts(
            np.empty((size, longest), np.int32),
            np.zeros(size, np.int64),
            np.zeros(size, np.int64),
            np.empty((size, longest)),
            np.zeros(size, np.bool_),
        )
        chosen = np.arange(size) if rows is None else kernel_array(rows, np.int64)
        tokens = kernel_array(token_ids, np.int32)
        bounds = [kernel_array(each, np.int32) for each in (num_tokens, max_draft_tokens)]
        with self._lock:
            branch.lookup(
                self._arrays,
                chosen,
                tokens,
                *bounds,
                self._slots_of(sequence_ids),
                min_match_len,
                float(floor),
                self._weights,
                *drafts,
            )
        return drafts

    def _slot_of(self, sequence_id: str) -> int:
        """A sequence's slot while the sequence is open or has tokens; else -1."""
        slot = self._slots.get(sequence_id, -1)
        arrays = self._arrays
        if slot >= 0 and (arrays.slot_open[slot] or arrays.slot_head[slot] >= 0):
            return slot
        return -1

    def _slots_of(self, sequence_ids: Sequence[str], must_be_open: bool = False) -> Int64Array:
        slots = np.array([self._slots.get(each, -1) for each in sequence_ids], np.int64)
        if must_be_open:
            slots[(slots >= 0) & ~self._arrays.slot_open[slots]] = -1
        return slots
