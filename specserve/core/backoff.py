"""Back-off: a pause after each failure, longer each time."""

from __future__ import annotations


class Backoff:
    """Doubles the pause with each failure, from ``first`` to ``most``.

    Times are in the caller's unit: seconds of a clock, or steps.
    """

    __slots__ = ("_first", "_most", "_pause", "_until")

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._pause = first
        self._until = float("-inf")

    def fail(self, now: float) -> None:
        """Counts a failure: the next try is due after the pause."""
        self._until = now + self._pause
        self._pause = min(2 * self._pause, self._most)

    def reset(self) -> None:
        """Counts a success: a try is due at once, and the next pause is ``first`` again."""
        self._pause, self._until = self._first, float("-inf")

    def is_due(self, now: float) -> bool:
        """Whether the pause is over."""
        return now >= self._until
