"""One namespace's draft memory: learns token sequences, and drafts what followed before.

Of one family with REST (arXiv 2311.08252), Lookahead's trie (arXiv 2312.12728) and SuffixDecoding
(arXiv 2411.04975): drafts are paths of a trie of earlier texts, taken by the weights of its
branches. Here the trie is never stored. A log of the texts with hashed contexts is, in flat arrays
of a fixed size; the branch below a context is put together when it is looked up, from the newest
places where the context stood.
"""

from __future__ import annotations

import threading

import numpy as np

from specserve.core.compile import direct, kernel_array
from specserve.core.types import DraftBatch, Drafts, Int32Array, Int64Array
from specserve.trie import pages
from specserve.trie.branch import Group
from specserve.trie.layout import (
    CLOCK,
    FROM_CLUSTER,
    GENERATION,
    HEAD,
    IS_OPEN,
    NEXT_FLAGS,
    NUM_EVICTED,
    NUM_FREE_SLOTS,
    NUM_TOKENS,
    PRIVATE,
    allocate,
    pages_in,
    reset,
)
from specserve.trie.step import step

LEAST_PAGES = 16
"""Below this a trie forgets a text while it is being learned."""

NO_SEQUENCE = -1
"""Number of no sequence."""

BatchArrays = tuple[Int64Array, Int32Array, Int32Array, Int32Array]
"""Slots, token ids, numbers of tokens and of prompt tokens, as in
:class:`specserve.core.types.DraftBatch`, fit for kernels."""


class TokenTrie:
    """Learns from many requests' texts. Calls may come from several threads.

    The least used text is forgotten first, 64 tokens at a time, when the memory is full. An open
    sequence has a number. What is asked of a number whose sequence was finished or cleared
    meanwhile is passed over.

    Args:
        max_bytes: memory that is never exceeded, about 61 bytes a token.

    Raises:
        ValueError: ``max_bytes`` is too small.
    """

    def __init__(self, max_bytes: int) -> None:
        num_pages = pages_in(max_bytes)
        if num_pages < LEAST_PAGES:
            raise ValueError(f"max_bytes: {max_bytes} is too small for {LEAST_PAGES} pages")
        self._arrays = allocate(num_pages)
        self._scratch = pages.Scratch.empty()
        self._lock = threading.Lock()
        self._of_step = own = self._arrays, self._scratch, Group.empty()
        batch, drafts = DraftBatch.empty()[:4], Drafts.empty(0, 1)
        none, _, rows, _ = batch
        of_step = *own, none, batch, rows, none, none, none, none, drafts
        self._step = direct(step, *of_step, False, 0, 0, 0.0)
        self._append = direct(pages.append_one, *own[:2], 0, rows, 0)
        self._free_a_slot = direct(pages.free_a_slot, *own[:2])
        self._remove = direct(pages.remove, *own[:2], 0)

    @property
    def num_pages(self) -> int:
        """Room, in pages of 64 tokens, each of one text."""
        return len(self._arrays.pages)

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

    def open(self, *, from_cluster: bool = False, private: bool = False) -> int:
        """Makes ready for a sequence's tokens.

        Args:
            from_cluster: it is of another replica's request.
            private: it is drafted from for its own request alone, and forgotten when finished.

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
        """Whether a sequence was neither finished nor cleared."""
        with self._lock:
            return self._open_slot(sequence) >= 0

    def append(self, sequence: int, tokens: Int32Array, *, num_prompt_tokens: int = 0) -> None:
        """Adds tokens to the end of a sequence; where some find no room, no draft runs over them.

        Args:
            tokens: int32 ``[k]``.
            num_prompt_tokens: how many of them, from the first one, are prompt.
        """
        tokens = kernel_array(tokens, np.int32)
        with self._lock:
            self._append(self._arrays, self._scratch, sequence, tokens, num_prompt_tokens)

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
        """Learns what is new of each text, and drafts what follows it, in one call.

        Args:
            rows: int64 ``[m]``, the rows to deal with.
            batch: n requests.
            limits: int32 ``[n]``, longest drafts; 0: none.
            sequences: int64 ``[slots]``, numbers of the requests' sequences, by their slots.
            num_learned: int64 ``[slots]``, tokens learned of each; updated.
            begins: int64 ``[n]``, written: what was learned of each row, nothing of other rows.
            ends: int64 ``[n]``, written.
            drafts: of n rows at least, written; labels as in ``branch``.
            skips_prompts: learn outputs alone.
            budget: how many tokens to learn of texts of which more than ``SMALL_TOKENS`` are new.
            min_match_len: shortest match, in tokens, at least 2.
            floor: a draft ends before its path's probability falls below this.

        Returns:
            What is left of the budget.
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

    def finish(self, sequence: int) -> None:
        """Closes a sequence: it may be forgotten now; a private one is, at once."""
        with self._lock:
            slot = self._open_slot(sequence)
            if slot < 0:
                return
            of_slot = self._arrays.slots[slot]
            if of_slot[NEXT_FLAGS] & PRIVATE or of_slot[HEAD] < 0:
                self._remove(self._arrays, self._scratch, slot)
            of_slot[IS_OPEN] = 0

    def clear(self) -> None:
        """Forgets everything; sequences that still grow are not learned any further."""
        with self._lock:
            # A step would wait while the arrays are written.
            if self._arrays.scalars[NUM_FREE_SLOTS] < self.num_pages:
                reset(self._arrays)

    def _open_slot(self, sequence: int) -> int:
        """A sequence's slot by its number; -1 where it is not open any more."""
        slot = sequence & 0xFFFFFFFF
        if sequence == NO_SEQUENCE:
            return -1
        of_slot = self._arrays.slots[slot]
        return slot if of_slot[IS_OPEN] and of_slot[GENERATION] == sequence >> 32 else -1
