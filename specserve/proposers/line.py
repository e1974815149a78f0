"""A cost that is linear in what it is made of, learned from noisy measurements that may change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MEMORY = 0.98
"""Weight of an observation after the next step of its size: some fifty steps count."""

KEPT_AT_CHANGE = 0.05
"""What is left of all that was learned before a lasting change."""

_CLIP_DEVIATIONS = 4.0
_FIRST_DEVIATION, _LEAST_DEVIATION, _MOST_DEVIATION = 0.25, 0.02, 1.0
_CHANGED_AFTER = 4
_LEAST_SECONDS = 1e-9
_ALWAYS_FITTED, _FIT_EVERY, _FADES_AFTER = 16, 8, 8
_LEAST_EVIDENCE = 16.0


class Clip:
    """Lets one stalled step teach little, and a lasting change much.

    A time is clipped to what is expected, give or take four usual deviations; several such times
    in a row are no stalls any more, but what steps cost now.
    """

    def __init__(self) -> None:
        self._deviation = _FIRST_DEVIATION
        self._num_clipped = 0

    def doubt(self, share: float) -> None:
        """What is expected is in part out of date."""
        self._deviation = max(self._deviation, share * _FIRST_DEVIATION)

    def __call__(self, expected: float, seconds: float) -> tuple[float, bool]:
        """(the time to learn from, whether all that was learned before is out of date)."""
        expected = max(expected, _LEAST_SECONDS)
        error = (seconds - expected) / expected
        reach = _CLIP_DEVIATIONS * self._deviation
        self._num_clipped = self._num_clipped + 1 if abs(error) > reach else 0
        has_changed = self._num_clipped == _CHANGED_AFTER
        if has_changed:
            self._num_clipped = 0
        else:
            error = min(max(error, -reach), reach)
        usual = min(max(abs(error), _LEAST_DEVIATION), _MOST_DEVIATION)
        self._deviation += 0.1 * (usual - self._deviation)
        return expected * (1 + error), has_changed


class Line:
    """A cost that is linear in its features, learned from what was measured.

    Ridge regression towards ``prior``, with forgetting and clipped residuals. The last coefficient
    may have been seen over a small range only, where noise could make anything of it: it is never
    below 0, and see :meth:`expect_last`.

    Args:
        prior: coefficients before any observation.
        precision: how many observations at 1 the prior of each coefficient weighs.
    """

    def __init__(self, prior: FloatArray, precision: FloatArray) -> None:
        self._prior = prior.copy()
        self._precision = precision
        self._most_last = np.inf
        self._num_observations = 0
        self._evidence = 0.0  # observations, as far as they are not forgotten
        self._is_due = False
        self._squares = np.zeros((len(prior), len(prior)))
        self._products = np.zeros(len(prior))
        self._clip = Clip()
        self._new: list[tuple[float, ...]] = []
        self.coefficients: list[float] = prior.tolist()

    def expect_last(self, prior: float, most: float) -> None:
        """Something else is known of the last coefficient now: what to expect, and its most."""
        if prior != self._prior[-1] or most != self._most_last:
            self._prior[-1], self._most_last = prior, most
            self._fit()

    def fade(self, num_steps: int) -> None:
        """After so many other steps: what is known stays, but counts less beside what comes.

        Some few make no difference.
        """
        if num_steps < _FADES_AFTER or not self._evidence:
            return
        self._take_in()
        kept = min(max(MEMORY**num_steps, _LEAST_EVIDENCE / self._evidence), 1.0)
        self._forget(kept)
        self._clip.doubt(1 - kept)
        self._is_due = True

    def add(self, features: Sequence[float], cost: float) -> None:
        """One observation."""
        pairs = zip(self.coefficients, features, strict=True)
        cost, has_changed = self._clip(sum(a * b for a, b in pairs), cost)
        if has_changed:
            self._take_in()
            self._forget(KEPT_AT_CHANGE)
        self._new.append((*features, cost))
        self._num_observations += 1
        is_new = self._num_observations < _ALWAYS_FITTED
        if self._is_due or has_changed or is_new or len(self._new) == _FIT_EVERY:
            self._fit()

    def _forget(self, kept: float) -> None:
        self._evidence *= kept
        self._squares *= kept
        self._products *= kept

    def _fit(self) -> None:
        self._is_due = False
        self._take_in()
        left = self._squares + np.diag(self._precision)
        right = self._products + self._precision * self._prior
        found = np.linalg.solve(left, right)
        last = min(max(found[-1], 0.0), self._most_last)
        if last != found[-1]:
            rest = np.linalg.solve(left[:-1, :-1], right[:-1] - left[:-1, -1] * last)
            found = np.append(rest, last)
        self.coefficients = found.tolist()

    def _take_in(self) -> None:
        # Some at once: a dozen calls of numpy at every step would be felt.
        if not self._new:
            return
        new = np.array(self._new)
        weights = MEMORY ** np.arange(len(new) - 1, -1, -1)
        features = new[:, :-1]
        self._forget(MEMORY ** len(new))
        self._squares += (features.T * weights) @ features
        self._products += features.T @ (weights * new[:, -1])
        self._evidence += weights.sum()
        self._new.clear()
