"""What a decoding step costs, learned while serving: with drafts, without, and per draft token."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MEMORY = 0.98
"""Weight of an observation after the next one of its sort: some fifty steps count."""

ASSUMED_TOKEN_SHARE = 0.01
"""Cost of a draft token as a share of a plain step, until steps with drafts were measured."""

CALIBRATION_STEPS = 3
"""Plain steps that are measured before any other."""

_CLIP_DEVIATIONS = 4.0
_LEAST_DEVIATION = 0.02
_CHANGED_AFTER = 4
_KEPT_AT_CHANGE = 0.05
_LEAST_SECONDS = 1e-9
_ALWAYS_FITTED, _FIT_EVERY = 16, 8


class StepCost:
    """Two lines, fitted to measured steps of ``n`` requests with ``d`` draft tokens.

    ``plain(n) = a + b n`` for steps without any draft, ``spec(n, d) = a' + b' n + c d`` for the
    others: an engine skips work in a step where no request has a draft, so that a first draft
    token costs more than the next one. Both are ridge regressions with forgetting; times are
    clipped to what the line expects, give or take four usual deviations, so that a stalled step
    teaches little. The plain line does not fade while all steps have drafts, nor the other one
    while none has; where steps with drafts were not measured, they cost as plain ones and
    ``ASSUMED_TOKEN_SHARE`` a token.
    """

    def __init__(self) -> None:
        self.most_draft_tokens = 0
        """Of all steps measured so far: the lines are not to be trusted far beyond."""
        self._first: list[float] = []
        self._plain = Line(np.array([1.0, 0.0]), np.array([0.01, 0.1]))
        self._spec = Line(np.array([1.0, 0.0, ASSUMED_TOKEN_SHARE]), np.array([1.0, 10.0, 50.0]))

    def observe(self, num_requests: int, num_draft_tokens: int, seconds: float) -> None:
        """One step; ``seconds`` greater than 0, else it is ignored."""
        if seconds <= 0 or num_requests <= 0:
            return
        if num_draft_tokens:
            self._spec.add((1.0, num_requests, num_draft_tokens), seconds)
            self.most_draft_tokens = max(self.most_draft_tokens, num_draft_tokens)
            return
        if len(self._first) < CALIBRATION_STEPS:
            # The very first steps may compile or warm caches: only their median is trusted.
            self._first.append(seconds)
            self._plain.restart(np.array([median(self._first), 0.0]))
        else:
            self._plain.add((1.0, num_requests), seconds)
        base, slope = self._plain.coefficients
        if self._spec.prior[0] != base:
            self._spec.prior = np.array([base, slope, ASSUMED_TOKEN_SHARE * base])
            if not self._spec.num_observations:
                self._spec.refit()

    @property
    def is_calibrated(self) -> bool:
        """Whether enough plain steps were measured to compare others with."""
        return len(self._first) >= CALIBRATION_STEPS

    def at(self, num_requests: int) -> tuple[float, float, float]:
        """Costs of a step of ``num_requests`` requests, in seconds.

        Returns:
            (without drafts, with drafts but for their tokens, of each draft token). Before the
            first step was measured a plain step counts as one second: only ratios matter.
        """
        base, slope = self._plain.coefficients
        plain = max(base + slope * num_requests, 0.1 * base)
        base, slope, token = self._spec.coefficients
        spec = max(base + slope * num_requests, plain)
        return plain, spec, max(token, 0.0)


class Line:
    """A cost that is linear in its features, learned from what was measured.

    Ridge regression towards ``prior``, with forgetting and clipped residuals.

    Args:
        prior: coefficients before any observation.
        precision: how many observations at 1 the prior of each coefficient weighs.
    """

    def __init__(self, prior: FloatArray, precision: FloatArray) -> None:
        self._precision = precision
        self.restart(prior)

    def restart(self, prior: FloatArray) -> None:
        """Forgets all observations."""
        self.prior = prior
        self.num_observations = 0
        self._squares = np.zeros((len(prior), len(prior)))
        self._products = np.zeros(len(prior))
        self._deviation = 0.25
        self._num_clipped = 0
        self._new: list[tuple[float, ...]] = []
        self.coefficients: list[float] = prior.tolist()

    def add(self, features: Sequence[float], seconds: float) -> None:
        """One observation."""
        pairs = zip(self.coefficients, features, strict=True)
        expected = max(sum(a * b for a, b in pairs), _LEAST_SECONDS)
        error = (seconds - expected) / expected
        reach = _CLIP_DEVIATIONS * self._deviation
        self._num_clipped = self._num_clipped + 1 if abs(error) > reach else 0
        if self._num_clipped == _CHANGED_AFTER:
            # No stalls any more: steps have another cost now.
            self._take_in()
            self._squares *= _KEPT_AT_CHANGE
            self._products *= _KEPT_AT_CHANGE
            self._num_clipped = 0
        else:
            error = min(max(error, -reach), reach)
        self._deviation += 0.1 * (max(abs(error), _LEAST_DEVIATION) - self._deviation)
        self._new.append((*features, expected * (1 + error)))
        self.num_observations += 1
        if self.num_observations < _ALWAYS_FITTED or len(self._new) == _FIT_EVERY:
            self.refit()

    def refit(self) -> None:
        """Takes new observations, or a new ``prior``, into account."""
        self._take_in()
        left = self._squares + np.diag(self._precision)
        right = self._products + self._precision * self.prior
        self.coefficients = np.linalg.solve(left, right).tolist()

    def _take_in(self) -> None:
        # Some at once: a dozen calls of numpy at every step would be felt.
        if not self._new:
            return
        new = np.array(self._new)
        weights = MEMORY ** np.arange(len(new) - 1, -1, -1)
        features = new[:, :-1]
        faded = MEMORY ** len(new)
        self._squares = faded * self._squares + (features.T * weights) @ features
        self._products = faded * self._products + features.T @ (weights * new[:, -1])
        self._new.clear()
