"""One namespace's draft memory: learns token sequences and drafts their continuations.

Like REST (arXiv 2311.08252), Lookahead (arXiv 2312.12728) and SuffixDecoding (arXiv 2411.04975), it
drafts paths of a trie of earlier texts, chosen by branch weight. Here the trie is implicit. Flat
arrays of a fixed size hold the texts and the hashes of their contexts. A lookup builds the branch
below a context from the newest places of the context.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from specserve.core.compile import direct, kernel_array
from specserve.core.types import DraftBatch, Drafts, Int32Array, Int64Array
from specserve.trie import pages
from specserve.trie.branch import Group
from specserve.trie.layout import (
    BUCKET,
    CUT,
    FROM_CLUSTER,
    GENERATION,
    HEAD,
    IS_OPEN,
    NEXT_FLAGS,
    NUM_EVICTED,
    NUM_FREE_SLOTS,
    NUM_INGESTED,
    NUM_TOKENS,
    PRIVATE,
    allocate,
    pages_in,
    reset,
)
from specserve.trie.step import step

MIN_PAGES = 16
"""Pages of the smallest trie; a smaller one would evict a text while it is being learned."""

_CLEARED_ENTRIES = 2048 * BUCKET
"""Entries of each level cleared at a time, about 0.1 ms: the longest wait of a step for a purge."""

NO_SEQUENCE = -1
"""Sequence number that stands for none."""

BatchArrays = tuple[Int64Array, Int32Array, Int32Array, Int32Array]
"""Slots, token ids, numbers of tokens and of prompt tokens, as in
:class:`specserve.core.types.DraftBatch`."""


class TokenTrie:
    """Learns the texts of many requests and drafts from them; thread-safe.

    When the memory is full, little used pages of 64 tokens are evicted. Each open sequence has a
    number. Calls with the number of a finished or cleared sequence have no effect.

    Args:
        max_bytes: limit of the memory, about 61 bytes a token.

    Raises:
        ValueError: ``max_bytes`` is too small.
    """

    def __init__(self, max_bytes: int) -> None:
        num_pages = pages_in(max_bytes)
        if num_pages < MIN_PAGES:
            raise ValueError(f"max_bytes: {max_bytes} is too small for {MIN_PAGES} pages")
        self._arrays = allocate(num_pages)
        self._scratch = pages.Scratch.empty()
        self._lock = threading.Lock()
        self._of_step = own = self._arrays, self._scratch, Group.empty()
        batch, drafts = DraftBatch.empty()[:4], Drafts.empty(0, 1)
        none, _, rows, _ = batch
        of_step = *own, none, batch, rows, none, none, none, none, drafts
        self._step = direct(step, *of_step, False, 0, 0, 0.0)
        self._append = direct(pages.append_one, *own[:2], 0, rows)
        self._free_a_slot = direct(pages.free_a_slot, *own[:2])
        self._remove = direct(pages.remove, *own[:2], 0)

    @property
    def num_pages(self) -> int:
        """Capacity in pages of 64 tokens; a page holds tokens of one text."""
        return len(self._arrays.pages)

    @property
    def num_tokens(self) -> int:
        """Tokens held now."""
        return int(self._arrays.scalars[NUM_TOKENS])

    @property
    def num_ingested_tokens(self) -> int:
        """Tokens learned so far."""
        return int(self._arrays.scalars[NUM_INGESTED])

    @property
    def num_evicted_tokens(self) -> int:
        """Tokens evicted so far."""
        return int(self._arrays.scalars[NUM_EVICTED])

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, used or not."""
        return sum(array.nbytes for array in self._arrays)

    def open(self, *, from_cluster: bool = False, private: bool = False) -> int:
        """Opens a sequence, to which one text's tokens can be appended.

        Args:
            from_cluster: the text comes from another replica.
            private: only its own request gets drafts from it; :meth:`finish` removes it.

        Returns:
            The sequence's number; ``NO_SEQUENCE`` if there is no room for one more.
        """
        with self._lock:
            arrays = self._arrays
            self._free_a_slot(arrays, self._scratch)
            free = int(arrays.scalars[NUM_FREE_SLOTS]) - 1
            if free < 0:
                return NO_SEQUENCE
            arrays.scalars[NUM_FREE_SLOTS] = free
            slot = int(arrays.free_slots[free])
            of_slot = arrays.slots[slot]
            of_slot[GENERATION] += 1
            of_slot[NEXT_FLAGS] = FROM_CLUSTER * from_cluster | PRIVATE * private
            of_slot[IS_OPEN] = 1
            return int(of_slot[GENERATION]) << 32 | slot

    def is_open(self, sequence: int) -> bool:
        """Whether a sequence is neither finished nor cleared."""
        with self._lock:
            return self._open_slot(sequence) >= 0

    def append(self, sequence: int, tokens: Int32Array) -> None:
        """Appends tokens to a sequence; without room, the rest is lost and drafts stop at the gap.

        Args:
            tokens: int32 ``[k]``.
        """
        tokens = kernel_array(tokens, np.int32)
        with self._lock:
            self._append(self._arrays, self._scratch, sequence, tokens)

    def step(
        self,
        rows: Int64Array,
        batch: BatchArrays,
        limits: Int32Array,
        sequences: Int64Array,
        num_learned: Int64Array,
        begins: Int64Array,
        ends: Int64Array,
        drafts: Drafts,
        *,
        skips_prompts: bool = False,
        budget: int = 1 << 31,
        min_match_len: int = 2,
        floor: float = 0.1,
    ) -> int:
        """Learns the new tokens of each text and drafts its continuation, in one call.

        Args:
            rows: int64 ``[m]``, the rows to process.
            batch: arrays of n requests.
            limits: int32 ``[n]``, draft length limits; 0 for no draft.
            sequences: int64 ``[slots]``, sequence number of each slot.
            num_learned: int64 ``[slots]``, tokens learned of each text; updated.
            begins: int64 ``[n]``, output: first learned token of each row; 0 for other rows.
            ends: int64 ``[n]``, output: end of the learned tokens; 0 for other rows.
            drafts: output, by slot; labels as in ``branch``.
            skips_prompts: whether to learn outputs only.
            budget: tokens to learn from texts that have more than ``SMALL_TOKENS`` new ones.
            min_match_len: shortest match, in tokens, at least 2.
            floor: a draft ends before its path's probability falls below this.

        Returns:
            The rest of the budget.
        """
        with self._lock:
            return int(
                self._step(
                    *self._of_step,
                    rows,
                    batch,
                    limits,
                    sequences,
                    num_learned,
                    begins,
                    ends,
                    drafts,
                    skips_prompts,
                    budget,
                    min_match_len,
                    floor,
                )
            )

    def skip(self, sequence: int) -> None:
        """Leaves a gap in a sequence: its next tokens do not follow its last ones."""
        with self._lock:
            if (slot := self._open_slot(sequence)) >= 0:
                self._arrays.slots[slot, NEXT_FLAGS] |= CUT

    def finish(self, sequence: int) -> None:
        """Closes a sequence; a private one is forgotten at once."""
        with self._lock:
            slot = self._open_slot(sequence)
            if slot < 0:
                return
            of_slot = self._arrays.slots[slot]
            if of_slot[NEXT_FLAGS] & PRIVATE or of_slot[HEAD] < 0:
                self._remove(self._arrays, self._scratch, slot)
            of_slot[IS_OPEN] = 0

    def clear(self) -> None:
        """Forgets everything and closes all sequences."""
        with self._lock:
            if self._arrays.scalars[NUM_FREE_SLOTS] == self.num_pages:  # it is empty
                return
            reset(self._arrays)
        table = self._arrays.table
        for begin in range(0, table.shape[1], _CLEARED_ENTRIES):
            time.sleep(0)  # lets a waiting step take the lock first
            with self._lock:
                table[:, begin : begin + _CLEARED_ENTRIES] = 0

    def _open_slot(self, sequence: int) -> int:
        """Slot of the open sequence with this number; -1 if it is not open."""
        slot = sequence & 0xFFFFFFFF
        if sequence == NO_SEQUENCE:
            return -1
        of_slot = self._arrays.slots[slot]
        return slot if of_slot[IS_OPEN] and of_slot[GENERATION] == sequence >> 32 else -1
