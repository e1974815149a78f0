"""The target's hidden states that a drafter has not confirmed yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from specserve.wire.messages import UInt16Array


class _Piece(msgspec.Struct, frozen=True):
    """States of ``start .. end - 1`` of one text; ``age`` counts the pieces of all."""

    age: int
    start: int
    end: int
    states: UInt16Array


@dataclass(slots=True, eq=False)
class TextStates:
    """A text's states: pieces without gaps between them.

    Attributes:
        end: position after the last state that came.
    """

    end: int = 0
    pieces: deque[_Piece] = field(default_factory=deque)

    def start(self, position: int) -> int:
        """First position from ``position`` on whose state is kept, and all that follow too."""
        return max(position, self.pieces[0].start if self.pieces else self.end)

    def between(self, start: int, end: int) -> UInt16Array:
        """States of positions ``start .. end - 1``; not before :meth:`start` of them."""
        last = self.pieces[-1]
        if last.start <= start:  # as in most steps
            return last.states[start - last.start : end - last.start]
        return np.concatenate(
            [
                piece.states[max(start - piece.start, 0) : end - piece.start]
                for piece in self.pieces
                if piece.start < end and piece.end > start
            ]
        )


class PendingStates:
    """Keeps states until they are confirmed.

    Args:
        max_tokens: how many are left by :meth:`trim`, of all texts together.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._num_pieces = 0
        self._by_age: deque[tuple[int, TextStates]] = deque()  # pieces may be gone

    def add(self, text: TextStates, start: int, states: UInt16Array) -> None:
        """Copies the states of positions ``start ..``; those that had come before are left out."""
        if start > text.end:
            self.confirm(text, text.end)  # nothing goes on from them
        elif start < text.end:
            states = states[text.end - start :]
            start = text.end
        if num_new := len(states):
            self._num_pieces += 1
            self.num_tokens += num_new
            text.end = start + num_new
            text.pieces.append(_Piece(self._num_pieces, start, text.end, states.copy()))
            self._by_age.append((self._num_pieces, text))

    def trim(self) -> None:
        """Loses the oldest states where there are too many; once those of a step have been sent.

        What is left of a piece still takes the memory of all of it; there is one such at a time.
        """
        if len(self._by_age) > 2 * self._max_tokens:
            self._by_age = deque(each for each in self._by_age if _is_kept(*each))
        while (excess := self.num_tokens - self._max_tokens) > 0:
            age, oldest = self._by_age[0]
            if not _is_kept(age, oldest):
                self._by_age.popleft()
                continue
            piece = oldest.pieces[0]
            if excess >= len(piece.states):
                self.confirm(oldest, piece.end)
            else:
                oldest.pieces[0] = _Piece(
                    piece.age, piece.start + excess, piece.end, piece.states[excess:]
                )
                self.num_tokens -= excess

    def confirm(self, text: TextStates, end: int) -> None:
        """States before ``end`` are not needed any more: whole pieces of them go."""
        pieces = text.pieces
        while pieces and pieces[0].end <= end:
            self.num_tokens -= len(pieces.popleft().states)

    def forget(self, text: TextStates) -> None:
        """The text has ended."""
        self.confirm(text, text.end)


def _is_kept(age: int, text: TextStates) -> bool:
    """Whether a text still has its piece of this age: they go in their order."""
    return bool(text.pieces) and age >= text.pieces[0].age
