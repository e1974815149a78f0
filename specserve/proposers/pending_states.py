"""The target's hidden states that a drafter has not confirmed yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from specserve.wire.messages import UInt16Array


@dataclass(frozen=True, slots=True)
class _Piece:
    """States of ``start ..`` of one text; ``age`` counts the pieces of all."""

    age: int
    start: int
    states: UInt16Array

    @property
    def end(self) -> int:
        return self.start + len(self.states)


@dataclass(slots=True)
class _Text:
    """A text's pieces, without gaps between them; the last one ends at ``end``."""

    end: int = 0
    pieces: deque[_Piece] = field(default_factory=deque)


class PendingStates:
    """Keeps states until they are confirmed.

    Args:
        max_tokens: how many are left by :meth:`trim`, of all texts together.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._texts: dict[int, _Text] = {}
        self._num_pieces = 0

    def add(self, text: int, start: int, states: UInt16Array) -> None:
        """Copies the states of positions ``start ..``; those that had come before are left out."""
        known = self._texts.setdefault(text, _Text())
        if start > known.end:
            self._drop(known, known.end)  # nothing goes on from them
        else:
            states = states[known.end - start :]
            start = known.end
        if len(states):
            known.pieces.append(_Piece(self._num_pieces, start, states.copy()))
            known.end = start + len(states)
            self._num_pieces += 1
            self.num_tokens += len(states)

    def trim(self) -> None:
        """Loses the oldest states where there are too many; once those of a step have been sent.

        What is left of a piece still takes the memory of all of it; there is one such at a time.
        """
        while (excess := self.num_tokens - self._max_tokens) > 0:
            oldest = min(
                (each for each in self._texts.values() if each.pieces),
                key=lambda each: each.pieces[0].age,
            )
            piece = oldest.pieces[0]
            if excess >= len(piece.states):
                self._drop(oldest, piece.end)
            else:
                oldest.pieces[0] = _Piece(piece.age, piece.start + excess, piece.states[excess:])
                self.num_tokens -= excess

    def end(self, text: int) -> int:
        """Position after the last state that came of a text."""
        return self._texts[text].end if text in self._texts else 0

    def start(self, text: int, position: int) -> int:
        """First position from ``position`` on whose state is kept, and all that follow too."""
        known = self._texts.get(text)
        if known is None or not known.pieces:
            return max(position, self.end(text))
        return max(position, known.pieces[0].start)

    def between(self, text: int, start: int, end: int) -> UInt16Array:
        """States of positions ``start .. end - 1``; not before :meth:`start` of them."""
        parts = [
            piece.states[max(start - piece.start, 0) : end - piece.start]
            for piece in self._texts[text].pieces
            if piece.start < end and piece.end > start
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def confirm(self, text: int, end: int) -> None:
        """States before ``end`` are not needed any more."""
        if text in self._texts:
            self._drop(self._texts[text], end)

    def forget(self, text: int) -> None:
        """The text has ended."""
        self.confirm(text, self.end(text))
        self._texts.pop(text, None)

    def _drop(self, text: _Text, end: int) -> None:
        """Drops whole pieces up to ``end``."""
        while text.pieces and text.pieces[0].end <= end:
            self.num_tokens -= len(text.pieces.popleft().states)
