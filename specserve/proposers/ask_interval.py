"""How often a source in this process is asked: seldom, where its drafts bring less than it costs.

A search takes little time, and so does judging what it found, but at every step, and no token
is computed meanwhile. Text that repeats nothing gains nothing from it.
"""

from __future__ import annotations

MOST_PAUSE = 8
"""Steps from one call to the next where nothing comes of them: a text that begins to repeat itself
is noticed after so many steps at the latest."""

_MEMORY = 0.98
_FIRST_YIELD, _FIRST_CALLS = 0.5, 2
_MOST_SECONDS_TIMES = 4.0


class AskInterval:
    """Compares the time that a source's accepted tokens save with the time that its calls take.

    While they save more, every step is a call; else the pauses double up to ``MOST_PAUSE``. Both
    sides are means over some fifty calls, the first ones of fewer; a stalled call counts as four
    usual ones.
    """

    def __init__(self) -> None:
        self._yield = _FIRST_YIELD  # tokens a call
        self._seconds = 0.0  # a call
        self._num_calls = _FIRST_CALLS  # so many the first yield counts for
        self._pause, self._step = 1, 0

    def worth(self, seconds_per_token: float) -> float:
        """Seconds that a call saves in the mean, less its own; see :meth:`is_due`."""
        return self._yield * seconds_per_token - self._seconds

    @property
    def is_slow(self) -> bool:
        """Whether the last steps were not all calls."""
        return self._pause > 1

    @property
    def num_idle_steps(self) -> int:
        """Steps that come before the next call, unless the source begins to pay."""
        return self._pause - 1 - self._step % self._pause

    def is_due(self, seconds_per_token: float, num_steps: int = 1) -> bool:
        """Whether to ask in this step.

        Args:
            seconds_per_token: what an accepted token saves: a plain step's time over its tokens.
            num_steps: since the last call of this method, with this one.
        """
        self._step += num_steps
        if self._yield * seconds_per_token >= self._seconds:
            self._pause = 1
            return True
        # Sources that are slow are asked in the same steps: those between cost nothing then.
        if self._step % self._pause:
            return False
        self._pause = min(2 * self._pause, MOST_PAUSE)
        return True

    def observe_call(self, seconds: float) -> None:
        """What a call took, with all that it brought along."""
        if self._seconds:
            seconds = min(seconds, _MOST_SECONDS_TIMES * self._seconds)
            self._seconds += (1 - _MEMORY) * (seconds - self._seconds)
        else:
            self._seconds = seconds
        self._num_calls += 1
        self._yield *= 1 - self._weight

    def observe_gain(self, num_tokens: float) -> None:
        """What one of its drafts brought: tokens accepted, less those that the time for verifying
        it would have been enough for."""
        self._yield += self._weight * num_tokens

    @property
    def _weight(self) -> float:
        """Of the last call in the mean."""
        return max(1 / self._num_calls, 1 - _MEMORY)
