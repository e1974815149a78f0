"""Pieces of text on their way from the decoding thread into records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

MAX_PIECES = 1 << 16
"""Pieces that wait, however short."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one request's text; the fields are those of a record."""

    namespace: str
    sequence: str
    start: int
    tokens: bytes
    num_prompt_tokens: int
    final: bool
    stamp: float

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // 4


class PieceQueue:
    """From one thread that must not wait to another one.

    Args:
        max_tokens: what does not fit is dropped.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._queue: deque[Piece] = deque()
        # Each of these is written by one of the two threads alone.
        self.put_tokens = 0
        self.dropped_tokens = 0
        self._got_tokens = 0

    def put(self, piece: Piece) -> bool:
        """Leaves a piece for the other thread; False if it was dropped."""
        if self.num_waiting + piece.num_tokens > self._max_tokens or len(self._queue) >= MAX_PIECES:
            self.dropped_tokens += piece.num_tokens
            return False
        self._queue.append(piece)
        self.put_tokens += piece.num_tokens
        return True

    @property
    def num_waiting(self) -> int:
        """Tokens put and not yet taken."""
        return self.put_tokens - self._got_tokens

    @property
    def oldest_stamp(self) -> float:
        """When the next piece was written, infinity if there is none; for the other thread."""
        return self._queue[0].stamp if self._queue else inf

    def taken(self) -> Iterator[Piece]:
        """Takes out what is there; for the other thread."""
        for _ in range(len(self._queue)):
            piece = self._queue.popleft()
            self._got_tokens += piece.num_tokens
            yield piece
