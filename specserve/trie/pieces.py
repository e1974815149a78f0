"""Pieces of text on their way from the decoding thread into records."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

import numpy as np

from specserve.core.types import Int32Array

FULL_TOKENS = 128
"""A text is passed on once this much of it has come; less waits a while for more, since a record
costs more memory than its tokens."""

MAX_PIECES = 1 << 16
"""Pieces that wait to be joined, however short."""


@dataclass(slots=True)
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


@dataclass(slots=True)
class _Text:
    """What has come of one request since it was last passed on."""

    pieces: list[Piece] = field(default_factory=list)
    num_tokens: int = 0

    def continues_with(self, piece: Piece) -> bool:
        """Whether the piece follows without a gap, and with no prompt after output."""
        last = self.pieces[-1]
        return piece.start == last.start + last.num_tokens and (
            not piece.num_prompt_tokens or last.num_prompt_tokens == last.num_tokens
        )

    def joined(self) -> Piece:
        first = self.pieces[0]
        return Piece(
            first.namespace,
            first.sequence,
            first.start,
            b"".join(piece.tokens for piece in self.pieces),
            sum(piece.num_prompt_tokens for piece in self.pieces),
            self.pieces[-1].final,
            first.stamp,
        )


class PieceQueue:
    """From one thread that must not wait to another one that joins what belongs together.

    Args:
        max_tokens: what does not fit is dropped.
        max_delay_s: how long a short text waits for more, in seconds.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        max_tokens: int,
        max_delay_s: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_delay_s = max_delay_s
        self._wall_clock = wall_clock
        self._queue: deque[Piece] = deque()
        self._texts: dict[tuple[str, str], _Text] = {}
        # Each of these is written by one of the two threads alone.
        self.put_tokens = 0
        self.dropped_tokens = 0
        self._got_tokens = 0

    def put(
        self,
        namespace: str,
        sequence: str,
        start: int,
        tokens: Int32Array,
        num_prompt_tokens: int,
        final: bool,
    ) -> bool:
        """Leaves a piece for the other thread; False if it was dropped. Copies ``tokens``."""
        content = np.asarray(tokens, dtype="<i4").tobytes()
        size = len(content) // 4
        if self.num_waiting + size > self._max_tokens or len(self._queue) >= MAX_PIECES:
            self.dropped_tokens += size
            return False
        self._queue.append(
            Piece(
                namespace,
                sequence,
                start,
                content,
                num_prompt_tokens,
                final,
                self._wall_clock(),
            )
        )
        self.put_tokens += size
        return True

    @property
    def num_waiting(self) -> int:
        """Tokens put that no joined piece has passed on yet."""
        return self.put_tokens - self._got_tokens

    @property
    def oldest_stamp(self) -> float:
        """When the oldest of them was written, infinity if there is none; for the other thread."""
        stamps = [text.pieces[0].stamp for text in self._texts.values()]
        if self._queue:
            stamps.append(self._queue[0].stamp)
        return min(stamps, default=inf)

    def joined(self, everything: bool = False) -> Iterator[Piece]:
        """Passes on what has waited long enough or is long enough; for the other thread.

        Args:
            everything: passes on all the rest as well.
        """
        for _ in range(len(self._queue)):
            yield from self._take(self._queue.popleft())
        due = self._wall_clock() - self._max_delay_s
        for key, text in list(self._texts.items()):
            if everything or text.pieces[0].stamp <= due:
                yield self._pass_on(key)

    def _take(self, piece: Piece) -> Iterator[Piece]:
        key = piece.namespace, piece.sequence
        text = self._texts.get(key)
        if text is not None and not text.continues_with(piece):
            yield self._pass_on(key)
            text = None
        if text is None:
            text = self._texts[key] = _Text()
        text.pieces.append(piece)
        text.num_tokens += piece.num_tokens
        if piece.final or text.num_tokens >= FULL_TOKENS:
            yield self._pass_on(key)

    def _pass_on(self, key: tuple[str, str]) -> Piece:
        piece = self._texts.pop(key).joined()
        self._got_tokens += piece.num_tokens
        return piece
