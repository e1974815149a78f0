"""How long to leave alone what failed, or brought nothing: longer with each time."""

from __future__ import annotations


class Backoff:
    """Doubles the pause with each failure, from ``first`` to ``most``.

    Times are the caller's own: seconds of a clock, or numbers of steps.
    """

    __slots__ = ("_first", "_most", "_pause", "_until")

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._pause = first
        self._until = float("-inf")

    def fail(self, now: float) -> None:
        """Once more; the next try is after a pause."""
        self._until = now + self._pause
        self._pause = min(2 * self._pause, self._most)

    def reset(self) -> None:
        """It went well: try at once, and pause briefly after the next failure."""
        self._pause, self._until = self._first, float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether the pause is over."""
        return now >= self._until
