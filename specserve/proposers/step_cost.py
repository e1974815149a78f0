"""What a decoding step costs, learned while serving: with drafts, without, and per draft token."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from statistics import median_low

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MEMORY = 0.98
"""Weight of an observation after the next one of its sort: some fifty steps count."""

ASSUMED_TOKEN_SHARE = 0.01
"""Cost of a draft token as a share of a plain step, until steps with drafts were measured."""

CALIBRATION_STEPS = 3
"""Plain steps that are measured before any other."""

_SIZES_PER_DOUBLING, _NEAR_SIZES = 2, 2
_CLIP_DEVIATIONS = 4.0
_LEAST_DEVIATION = 0.02
_CHANGED_AFTER = 4
_KEPT_AT_CHANGE = 0.05
_LEAST_SECONDS = 1e-9
_ALWAYS_FITTED, _FIT_EVERY = 16, 8
_ALL_MEASURED, _MEASURE_EVERY = 64, 4


class StepCost:
    """The cost of steps of ``n`` requests with ``d`` draft tokens, by the size of ``n``.

    Plain steps are measured for each size apart, two sizes to a doubling of ``n``, with straight
    lines between them. A step with drafts costs so many plain ones of its ``n``, as a line in
    ``d`` for each size: an engine skips work in a step where no request has a draft, so that a
    first draft token costs more than the next one. A size that was not measured takes over what
    is known of the nearest; where no steps with drafts were, they cost as plain ones and
    ``ASSUMED_TOKEN_SHARE`` a token. What is known of one size does not fade while others run.
    """

    def __init__(self) -> None:
        self.most_draft_tokens = 0
        """Of all steps measured so far: the lines are not to be trusted far beyond."""
        self._plain: dict[int, _PlainSteps] = {}
        self._spec: dict[int, Line] = {}
        self._points: list[tuple[float, float]] = []

    def observe(self, num_requests: int, num_draft_tokens: int, seconds: float) -> None:
        """One step; ``seconds`` greater than 0, else it is ignored."""
        if seconds <= 0 or num_requests <= 0:
            return
        size = size_of(num_requests)
        if not num_draft_tokens:
            if self._plain.setdefault(size, _PlainSteps()).add(num_requests, seconds):
                known = self._plain.values()
                self._points = sorted((each.requests, each.seconds) for each in known)
        elif self._points:
            self.most_draft_tokens = max(self.most_draft_tokens, num_draft_tokens)
            plain = self._plain_seconds(num_requests)
            if size not in self._spec:
                prior = np.array(self._drafts_at(size, plain))
                self._spec[size] = Line(prior, np.array([1.0, 50.0 / plain**2]))
            # In plain steps, so that the errors of short and long steps weigh alike.
            self._spec[size].add((1.0, num_draft_tokens / plain), seconds / plain)

    def is_calibrated(self, num_requests: int) -> bool:
        """Whether enough plain steps of about so many requests were measured to compare with."""
        if sum(each.count for each in self._plain.values()) < CALIBRATION_STEPS:
            return False
        size = size_of(num_requests)
        return any(abs(size - each) <= _NEAR_SIZES for each in self._plain)

    def at(self, num_requests: int) -> tuple[float, float, float]:
        """Costs of a step of ``num_requests`` requests, in seconds.

        Returns:
            (without drafts, with drafts but for their tokens, of each draft token). Before the
            first step was measured a plain step counts as one second: only ratios matter.
        """
        plain = self.plain(num_requests)
        base, token = self._drafts_at(size_of(num_requests), plain)
        return plain, plain * max(base, 1.0), max(token, 0.0)

    def plain(self, num_requests: int) -> float:
        """The first of :meth:`at`."""
        return self._plain_seconds(num_requests) if self._points else 1.0

    def _drafts_at(self, size: int, plain: float) -> tuple[float, float]:
        """Cost of a step with drafts, in plain steps, and of each draft token, in seconds."""
        if not self._spec:
            return 1.0, ASSUMED_TOKEN_SHARE * plain
        near = min(self._spec, key=lambda each: (abs(each - size), each))
        base, token = self._spec[near].coefficients
        return base, token

    def _plain_seconds(self, num_requests: float) -> float:
        """Between the measured points, and a little beyond them."""
        points = self._points
        if len(points) == 1:
            return points[0][1]
        right = 1
        while right < len(points) - 1 and points[right][0] < num_requests:
            right += 1
        (low, low_s), (high, high_s) = points[right - 1], points[right]
        seconds = low_s + (high_s - low_s) * (num_requests - low) / (high - low)
        return max(seconds, 0.1 * min(low_s, high_s))


def size_of(num_requests: int) -> int:
    """A number for about so many requests: 0 for one, and two more for each doubling."""
    return round(_SIZES_PER_DOUBLING * log2(num_requests))


class _PlainSteps:
    """Typical plain steps of one size.

    Attributes:
        count: how many were measured.
        requests: in them, in the mean.
        seconds: of one.
    """

    def __init__(self) -> None:
        self.count = 0
        self.requests = self.seconds = 0.0
        self._first: list[float] = []
        self._clip = Clip()

    def add(self, num_requests: int, seconds: float) -> bool:
        """One step; false: it was passed over, as most are where many were measured."""
        self.count += 1
        if self.count > _ALL_MEASURED and self.count % _MEASURE_EVERY:
            return False
        weight = max(1 / self.count, 1 - MEMORY)
        self.requests += weight * (num_requests - self.requests)
        if self.count <= CALIBRATION_STEPS:
            # The very first steps may compile, warm caches, or run beside a drafter that reads the
            # prompts: of two the faster one is trusted, of three the median.
            self._first.append(seconds)
            self.seconds = median_low(self._first)
            return True
        seconds, has_changed = self._clip(self.seconds, seconds)
        self.seconds += (1 - _KEPT_AT_CHANGE if has_changed else weight) * (seconds - self.seconds)
        return True


class Clip:
    """Lets one stalled step teach little, and a lasting change much.

    A time is clipped to what is expected, give or take four usual deviations; several such times
    in a row are no stalls any more, but what steps cost now.
    """

    def __init__(self) -> None:
        self._deviation = 0.25
        self._num_clipped = 0

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
        self._deviation += 0.1 * (max(abs(error), _LEAST_DEVIATION) - self._deviation)
        return expected * (1 + error), has_changed


class Line:
    """A cost that is linear in its features, learned from what was measured.

    Ridge regression towards ``prior``, with forgetting and clipped residuals.

    Args:
        prior: coefficients before any observation.
        precision: how many observations at 1 the prior of each coefficient weighs.
    """

    def __init__(self, prior: FloatArray, precision: FloatArray) -> None:
        self._prior = prior
        self._precision = precision
        self._num_observations = 0
        self._squares = np.zeros((len(prior), len(prior)))
        self._products = np.zeros(len(prior))
        self._clip = Clip()
        self._new: list[tuple[float, ...]] = []
        self.coefficients: list[float] = prior.tolist()

    def add(self, features: Sequence[float], cost: float) -> None:
        """One observation."""
        pairs = zip(self.coefficients, features, strict=True)
        cost, has_changed = self._clip(sum(a * b for a, b in pairs), cost)
        if has_changed:
            self._take_in()
            self._squares *= _KEPT_AT_CHANGE
            self._products *= _KEPT_AT_CHANGE
        self._new.append((*features, cost))
        self._num_observations += 1
        if self._num_observations < _ALWAYS_FITTED or len(self._new) == _FIT_EVERY:
            self._take_in()
            left = self._squares + np.diag(self._precision)
            right = self._products + self._precision * self._prior
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
