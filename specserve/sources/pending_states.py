"""The target's hidden states that a drafter has not confirmed yet."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from specserve.core.types import HiddenStates, Int32Array, Int64Array, UInt16Array

LARGE_TOKENS = 64
"""More states of one text than this come to the host by themselves: they are never copied again."""


@dataclass(slots=True, eq=False)
class _Piece:
    """States of positions ``start .. end - 1``: those from ``offset`` on in what came together."""

    start: int
    end: int
    copy: Callable[[], UInt16Array]
    offset: int

    def states(self) -> UInt16Array:
        """Waits until they are there."""
        return self.copy()[self.offset : self.offset + self.end - self.start]

    def settle(self) -> None:
        """Keeps them without those that came with them."""
        states = self.states().copy()
        self.copy, self.offset = lambda: states, 0


class PendingStates:
    """Keeps states by slot until they are confirmed; of each text a run without gaps.

    A step's states are on their way to the host when they are added. They are waited for when they
    are read, or in the next step, when they have long come.

    Args:
        num_slots: texts at a time.
        max_tokens: how many states of earlier steps are kept, of all texts together.

    Attributes:
        starts: int64 ``[num_slots]``, position of the first state kept of each text.
        ends: int64 ``[num_slots]``, position after its last state.
        num_tokens: states kept, of all texts.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.starts: Int64Array = np.zeros(num_slots, np.int64)
        self.ends: Int64Array = np.zeros(num_slots, np.int64)
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._pieces: defaultdict[int, deque[_Piece]] = defaultdict(deque)
        self._unsettled: list[tuple[int, _Piece]] = []

    def first(self, slots: Int64Array, hidden: HiddenStates) -> Int64Array:
        """Where the run of some texts, all of a step in their order, begins with its states.

        Behind a gap it begins anew. States that had come before change nothing.
        """
        return np.where(hidden.starts > self.ends[slots], hidden.starts, self.starts[slots])

    def add(
        self, slots: Int64Array, num_tokens: Int32Array, hidden: HiddenStates, rows: Int64Array
    ) -> None:
        """Starts to copy what is new of a step's states; loses earlier ones if there are too many.

        Args:
            slots: int64 ``[r]``, of the rows.
            num_tokens: int32 ``[r]``, tokens of their texts: the last one has no state yet, and
                those behind it are of refused drafts.
            hidden: the step's.
            rows: int64 ``[r]``, rows of the step, whose states are wanted.
        """
        self._settle()
        while self.num_tokens > self._max_tokens:  # the first ones of the text that has most
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
        """States of positions ``start .. end - 1``, which are kept; waits for their copies."""
        parts = [
            piece.states()[max(start - piece.start, 0) : end - piece.start]
            for piece in self._pieces[slot]
            if piece.start < end and piece.end > start
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def confirm(self, slot: int, end: int) -> None:
        """States before ``end`` are not needed any more: whole pieces of them go."""
        pieces = self._pieces[slot]
        while pieces and pieces[0].end <= end:
            piece = pieces.popleft()
            self.num_tokens -= piece.end - piece.start
        self.starts[slot] = pieces[0].start if pieces else self.ends[slot]

    def drop(self, slot: int) -> None:
        """None of a text's states are needed any more."""
        self.confirm(slot, int(self.ends[slot]))

    def close(self, slot: int) -> None:
        """The text has ended; the slot's next one begins at position 0."""
        self.drop(slot)
        self.starts[slot] = self.ends[slot] = 0

    def _copy(self, new: Sequence[tuple[int, int, int, int, int]], hidden: HiddenStates) -> None:
        """Starts the copy of some rows' states: (row, slot, start, end, states of the row)."""
        if not new:
            return
        copy, offset = cache(hidden.to_host(np.array([row for row, *_ in new]))), 0
        for _, slot, start, end, size in new:
            known = int(self.ends[slot])
            if start > known:
                self.drop(slot)  # nothing goes on from them
                known = self.starts[slot] = start
            piece = _Piece(known, end, copy, offset + known - start)
            self._pieces[slot].append(piece)
            self.ends[slot] = end
            self.num_tokens += end - known
            offset += size
            if len(new) > 1:
                self._unsettled.append((slot, piece))

    def _settle(self) -> None:
        for slot, piece in self._unsettled:
            pieces = self._pieces[slot]
            if pieces and pieces[-1] is piece:
                piece.settle()
        self._unsettled.clear()
