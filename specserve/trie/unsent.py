"""Collects tokens of open texts that are not published to the other replicas yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specserve.core.compile import direct, kernel
from specserve.core.types import DraftBatch, Float64Array, Int32Array, Int64Array
from specserve.trie.memory import SharedMemory
from specserve.trie.records import TextPiece
from specserve.trie.token_trie import BatchArrays

FULL_TOKENS = 128
"""Unsent tokens with which a text is published at once. Fewer tokens wait for more, because each
record takes memory besides its tokens."""

MAX_DELAY_S = 0.4
"""How long fewer tokens wait for more, in seconds."""

CHECK_S = 0.05
"""Time between two checks for texts that have waited long enough, in seconds."""

MAX_AT_ONCE = 32
"""Texts published after one check, those that waited longest first: about 0.1 ms."""


class Tails(NamedTuple):
    """The unsent tail of each slot's text.

    Attributes:
        tokens: int32 ``[slots, FULL_TOKENS]``.
        starts: int64 ``[slots]``, position of the tail's first token in the text.
        lengths: int64 ``[slots]``, fewer than ``FULL_TOKENS``.
        since: float64 ``[slots]``, time of the tail's first token, by the monotonic clock.
    """

    tokens: Int32Array
    starts: Int64Array
    lengths: Int64Array
    since: Float64Array


class UnsentTexts:
    """Collects the learned tokens of each request, and publishes them in pieces.

    Calls come from one thread.

    Args:
        num_slots: requests that may be open at a time.
        clock: monotonic seconds.
        wall_clock: seconds since 1970, for the stamps.
    """

    def __init__(
        self,
        shared: SharedMemory,
        num_slots: int,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._shared = shared
        self._clock, self._wall_clock = clock, wall_clock
        self._names = [("", "")] * num_slots
        self._began = [0.0] * num_slots
        self._is_shared = np.zeros(num_slots, np.bool_)
        self._full = np.zeros(num_slots, np.int64)
        self._next_check = 0.0
        self._tails = Tails(
            np.zeros((num_slots, FULL_TOKENS), np.int32),
            np.zeros(num_slots, np.int64),
            np.zeros(num_slots, np.int64),
            np.zeros(num_slots),
        )
        batch = DraftBatch.empty()[:4]
        none = batch[0]
        self._collect = direct(
            collect, self._tails, self._is_shared, batch, none, none, 0.0, self._full
        )

    def open(self, slot: int, namespace: str, name: str, began: float = 0.0) -> None:
        """Starts a text that is shared with other replicas; ``began`` 0.0: it begins now."""
        self._names[slot] = namespace, name
        self._began[slot] = began or self._wall_clock()
        self._is_shared[slot] = True
        self._tails.lengths[slot] = self._tails.starts[slot] = 0

    def add(self, batch: BatchArrays, begins: Int64Array, ends: Int64Array) -> None:
        """Adds ``token_ids[i, begins[i]:ends[i]]`` of each shared row; publishes what is due."""
        now = self._clock()
        tails = self._tails
        num_full = self._collect(tails, self._is_shared, batch, begins, ends, now, self._full)
        slots, token_ids, _, _ = batch
        for row in self._full[:num_full].tolist():
            slot = int(slots[row])
            self._publish(slot, token_ids[row, tails.starts[slot] : ends[row]])
        if now >= self._next_check:
            self._next_check = now + CHECK_S
            waiting = np.flatnonzero((tails.lengths > 0) & (tails.since <= now - MAX_DELAY_S))
            waiting = waiting[np.argsort(tails.since[waiting], kind="stable")]
            for slot in waiting[:MAX_AT_ONCE].tolist():
                self._publish_tail(slot)

    def close(self, slot: int) -> None:
        """Publishes the end of a slot's text; does nothing if the text is not shared."""
        if self._is_shared[slot]:
            self._publish_tail(slot, final=True)
            self._is_shared[slot] = False

    def _publish_tail(self, slot: int, *, final: bool = False) -> None:
        self._publish(slot, self._tails.tokens[slot, : self._tails.lengths[slot]], final=final)

    def _publish(self, slot: int, tokens: Int32Array, *, final: bool = False) -> None:
        tails, (namespace, name) = self._tails, self._names[slot]
        start = int(tails.starts[slot])
        age_s = self._clock() - float(tails.since[slot]) if len(tokens) else 0.0
        stamp = self._wall_clock() - age_s
        piece = TextPiece(namespace, name, start, tokens, final, stamp, self._began[slot])
        self._shared.publish(piece)
        tails.starts[slot], tails.lengths[slot] = start + len(tokens), 0


@kernel
def collect(tails, is_shared, batch, begins, ends, now, full):  # type: ignore[no-untyped-def]
    """Copies new tokens to the tails; writes to ``full`` the rows to publish, returns how many."""
    slots, token_ids, _, _ = batch
    num_full = 0
    for row in range(slots.shape[0]):
        slot, begin, end = slots[row], begins[row], ends[row]
        if begin == end or not is_shared[slot]:
            continue
        # After a failed step the tail lacks learned tokens: it starts again at ``begin``.
        if not tails.lengths[slot] or tails.starts[slot] + tails.lengths[slot] != begin:
            tails.starts[slot], tails.since[slot] = begin, now
        start = tails.starts[slot]
        if end - start >= FULL_TOKENS:
            full[num_full] = row
            num_full += 1
            continue
        for position in range(begin, end):
            tails.tokens[slot, position - start] = token_ids[row, position]
        tails.lengths[slot] = end - start
    return num_full
