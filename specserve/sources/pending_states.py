"""Keeps the target's hidden states until the drafter confirms them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from specserve.core.types import HiddenStates, Int32Array, Int64Array, UInt16Array

LARGE_TOKENS = 64
"""More states than this of one text in a step come to the host in a copy of their own. Others are
copied together, and once more in the next step so that the shared array can be freed."""


@dataclass(slots=True, eq=False)
class _Piece:
    """States of positions ``start .. end - 1``; they begin at ``offset`` in the copy's result."""

    start: int
    end: int
    copy: Callable[[], UInt16Array]
    offset: int

    def states(self) -> UInt16Array:
        """uint16 ``[end - start, hidden_size]``; waits for the copy."""
        return self.copy()[self.offset : self.offset + self.end - self.start]

    def detach(self) -> None:
        """Copies the states out of the shared array, so that it can be freed."""
        states = self.states().copy()
        self.copy, self.offset = lambda: states, 0


class PendingStates:
    """Keeps the states of each slot's text until they are confirmed, as one range without gaps.

    :meth:`add` starts the copy to the host without waiting for it. The wait is in :meth:`between`
    or in the next step's :meth:`add`, when the copy has usually finished.

    Args:
        num_slots: most texts at a time.
        max_tokens: most states that are kept from earlier steps, of all texts together.

    Attributes:
        starts: int64 ``[num_slots]``, position of each text's first kept state.
        ends: int64 ``[num_slots]``, position after its last kept state.
        num_tokens: number of kept states, of all texts together.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.starts: Int64Array = np.zeros(num_slots, np.int64)
        self.ends: Int64Array = np.zeros(num_slots, np.int64)
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._pieces: defaultdict[int, deque[_Piece]] = defaultdict(deque)
        self._shared: list[tuple[int, _Piece]] = []

    def first(self, slots: Int64Array, hidden: HiddenStates) -> Int64Array:
        """Where each text's kept range will begin once this step's states are added.

        After a gap the range begins at the new states, otherwise where it begins now. ``slots`` are
        those of all requests of the step, in their order.
        """
        return np.where(hidden.starts > self.ends[slots], hidden.starts, self.starts[slots])

    def add(
        self, slots: Int64Array, num_tokens: Int32Array, hidden: HiddenStates, rows: Int64Array
    ) -> None:
        """Starts to copy a step's new states; first drops kept ones above ``max_tokens``.

        Args:
            slots: int64 ``[r]``, of the rows.
            num_tokens: int32 ``[r]``, length of their texts. The last token has no state yet, and
                states after it belong to rejected draft tokens.
            hidden: the step's states.
            rows: int64 ``[r]``, rows of the step whose states are kept.
        """
        self._detach_shared()
        while self.num_tokens > self._max_tokens:  # the first piece of the text that has most
            slot = int((self.ends - self.starts).argmax())
            self.confirm(slot, self._pieces[slot][0].end)
        starts, sizes = hidden.starts[rows], hidden.num_tokens[rows]
        ends = np.minimum(starts + sizes, num_tokens - 1)
        is_new = ends > np.maximum(starts, self.ends[slots])
        of_rows = (each[is_new].tolist() for each in (rows, slots, starts, ends, sizes))
        new = list(zip(*of_rows, strict=True))
        self._copy([each for each in new if each[-1] <= LARGE_TOKENS], hidden)
        for each in new:
            if each[-1] > LARGE_TOKENS:
                self._copy([each], hidden)

    def between(self, slot: int, start: int, end: int) -> UInt16Array:
        """States of positions ``start .. end - 1``, all of them kept; waits for their copies."""
        parts = [
            piece.states()[max(start - piece.start, 0) : end - piece.start]
            for piece in self._pieces[slot]
            if piece.start < end and piece.end > start
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def confirm(self, slot: int, end: int) -> None:
        """Drops the pieces whose states are all before position ``end``."""
        pieces = self._pieces[slot]
        while pieces and pieces[0].end <= end:
            piece = pieces.popleft()
            self.num_tokens -= piece.end - piece.start
        self.starts[slot] = pieces[0].start if pieces else self.ends[slot]

    def drop(self, slot: int) -> None:
        """Drops all kept states of a text."""
        self.confirm(slot, int(self.ends[slot]))

    def close(self, slot: int) -> None:
        """Drops the states of a text that has ended; the slot's next text begins at position 0."""
        self.drop(slot)
        self.starts[slot] = self.ends[slot] = 0

    def _copy(self, new: Sequence[tuple[int, int, int, int, int]], hidden: HiddenStates) -> None:
        """Starts one copy for several rows: (row, slot, start, end, number of its states)."""
        if not new:
            return
        copy, offset = cache(hidden.to_host(np.array([row for row, *_ in new]))), 0
        for _, slot, start, end, size in new:
            known = int(self.ends[slot])
            if start > known:
                self.drop(slot)  # states before a gap are of no use
                known = self.starts[slot] = start
            piece = _Piece(known, end, copy, offset + known - start)
            self._pieces[slot].append(piece)
            self.ends[slot] = end
            self.num_tokens += end - known
            offset += size
            if len(new) > 1:
                self._shared.append((slot, piece))

    def _detach_shared(self) -> None:
        for slot, piece in self._shared:
            pieces = self._pieces[slot]
            if pieces and pieces[-1] is piece:
                piece.detach()
        self._shared.clear()
