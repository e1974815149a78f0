"""A source with given answers that records its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specserve.core.types import DraftBatch, Drafts, Int32Array, Int64Array, RequestControls

Answer = Callable[[DraftBatch, Int32Array], Drafts]


class AnsweringSource:
    """Answers with the result of a function of (batch, limits)."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.limits: list[list[int]] = []
        self.opened: list[int] = []
        self.closed: list[int] = []

    def open(self, slot: int, controls: RequestControls) -> None:
        self.opened.append(slot)

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        self.limits.append(limits.tolist())
        found = self.answer(batch, limits)
        slots = batch.slots
        drafts.tokens[slots], drafts.lengths[slots] = found.tokens, found.lengths
        drafts.confidence[slots], drafts.labels[slots] = found.confidence, found.labels

    def close(self, slots: Int64Array) -> None:
        self.closed += slots.tolist()

    @property
    def num_asked(self) -> int:
        """Number of calls that asked for a draft."""
        return sum(map(any, self.limits))


def drafts(
    rows: Sequence[Sequence[int]], confidence: float = 0.9, labels: Sequence[int] = ()
) -> Drafts:
    """Drafts of these tokens, one row per request."""
    found = Drafts.empty(len(rows), max([8, *map(len, rows)]))
    for row, tokens in enumerate(rows):
        found.tokens[row, : len(tokens)] = tokens
        found.lengths[row] = len(tokens)
    found.confidence[:] = confidence
    found.labels[: len(labels)] = labels
    return found


def always(*tokens: int, confidence: float = 0.9) -> AnsweringSource:
    """A source with the same draft for each request."""
    return AnsweringSource(lambda batch, limits: drafts([tokens] * len(limits), confidence))


def broken(batch: DraftBatch, limits: Int32Array) -> Drafts:
    raise OSError("no route to the drafter")


def batch(size: int, length: int = 8) -> DraftBatch:
    """``size`` requests with equal texts, in slots 0 .. ``size - 1``."""
    count = np.full(size, length, np.int32)
    return DraftBatch(np.arange(size), np.ones((size, 64), np.int32), count, count)


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
