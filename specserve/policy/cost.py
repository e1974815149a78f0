"""What decoding steps and calls of drafters cost, learned while serving.

A cost is linear in three features. Its coefficients are tracked by a Kalman filter in which they
drift, each by itself and all together: longer texts, or another load, make everything dearer. The
variance of a coefficient grows while nothing is measured that depends on it, so that the filter
also tells what is not known well enough any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

import numpy as np

from specserve.core.compile import kernel
from specserve.core.types import Float64Array

CALIBRATION_STEPS = 3
"""Plain steps of about so many requests that are measured before drafts are sent."""

_ASSUMED_SLOPE = 0.01
"""Cost of a draft token in plain steps, before any was measured."""

_NEAR_SIZES = 2
_TOO_SHORT = 2.0
_LEAST_S = 1e-6
_CHANGED_AFTER = 3
_LEAST_NOISE, _MOST_NOISE = 0.01, 0.3
_CLIP = 3.0
_COMMON_DRIFT = 0.005


class LinearCost:
    """Seconds as ``coefficients . features``, three of each.

    Args:
        prior: coefficients before any measurement, in seconds.
        deviation: how wrong each of them may be, in seconds.
        drift: by how much each changes from one measurement to the next, in seconds.
    """

    def __init__(
        self, prior: Sequence[float], deviation: Sequence[float], drift: Sequence[float]
    ) -> None:
        self._mean = np.array(prior, np.float64)
        self._covariance = np.diag(np.array(deviation, np.float64) ** 2)
        self._drift = np.array(drift, np.float64) ** 2
        self._noise = np.array([0.05, 0.0])  # relative; clipped measurements in a row, signed

    @property
    def coefficients(self) -> list[float]:
        """Now, in seconds."""
        return self._mean.tolist()  # type: ignore[no-any-return]

    def deviation(self, features: Sequence[float]) -> float:
        """Standard deviation of the cost that these features have, in seconds."""
        return math.sqrt(max(_variance(self._covariance, np.array(features, np.float64)), 0.0))

    def scale(self, factor: float) -> None:
        """Everything costs so many times what was believed, and is as uncertain relative to it."""
        self._mean *= factor
        self._covariance *= factor**2
        self._drift *= factor**2

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """One measurement; of one that is far off, only a part is believed.

        Several in a row that are far off in the same direction say that the cost has changed. What
        took no time that could be measured is ignored.
        """
        if seconds <= 0:
            return
        values = np.array(features, np.float64)
        _update(self._mean, self._covariance, self._drift, self._noise, values, seconds)


class StepCost:
    """The cost of steps of n requests with m draft tokens: ``plain + (base - plain + slope m)``.

    By the size of n, two sizes to a doubling. An engine skips work in a step where no request has a
    draft, so that the first draft token costs more than the next one. A size that was not measured
    takes over what is known of the nearest.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, LinearCost] = {}
        self._num_plain: dict[int, int] = {}
        self.most_draft_tokens = 0
        """Of all steps measured so far: the lines are not to be trusted far beyond."""

    def observe(self, num_requests: int, num_draft_tokens: int, seconds: float) -> None:
        """A step that decoded ``num_requests`` requests and did nothing else.

        Args:
            num_requests: each had one token and its draft verified.
            num_draft_tokens: of all requests together.
            seconds: more than 0, else it is ignored.
        """
        if seconds <= 0 or num_requests <= 0:
            return
        size = size_of(num_requests)
        line = self._sizes.get(size)
        if line is None:
            line = self._sizes[size] = self._new_line(num_requests, num_draft_tokens, seconds)
        features = _features(num_draft_tokens)
        believed = sum(map(mul, line.coefficients, features))
        if believed > _TOO_SHORT * seconds:
            # No step is that much shorter by chance. The first ones may have compiled something.
            line.scale(seconds / believed)
        line.observe(features, seconds)
        if num_draft_tokens:
            self.most_draft_tokens = max(self.most_draft_tokens, num_draft_tokens)
        else:
            self._num_plain[size] = self._num_plain.get(size, 0) + 1

    def is_calibrated(self, num_requests: int) -> bool:
        """Whether enough plain steps of about so many requests were measured to compare with."""
        size = size_of(num_requests)
        near = range(size - _NEAR_SIZES, size + _NEAR_SIZES + 1)
        return sum(self._num_plain.get(each, 0) for each in near) >= CALIBRATION_STEPS

    def at(self, num_requests: int) -> tuple[float, float, float]:
        """Seconds of a plain step, of one with drafts but for their tokens, of each draft token.

        Before the first measurement a plain step counts as one second: only ratios matter.
        """
        line = self._nearest(num_requests)
        if line is None:
            return 1.0, 1.0, _ASSUMED_SLOPE
        plain, first, slope = line.coefficients
        plain = max(plain, _LEAST_S)
        return plain, plain + max(first, 0.0), max(slope, 1e-4 * plain)

    def doubt(self, num_requests: int, num_draft_tokens: int) -> float:
        """Standard deviation, in seconds, of what such a step costs beyond a plain one."""
        line = self._nearest(num_requests)
        features = 0.0, 1.0, float(num_draft_tokens)
        return 0.0 if line is None else line.deviation(features)

    def _nearest(self, num_requests: int) -> LinearCost | None:
        size = size_of(num_requests)
        if (line := self._sizes.get(size)) is not None or not self._sizes:
            return line
        return self._sizes[min(self._sizes, key=lambda each: (abs(each - size), each))]

    def _new_line(self, num_requests: int, num_draft_tokens: int, seconds: float) -> LinearCost:
        """Of a size measured for the first time, by its first step and its neighbours' ratios."""
        plain, base, slope = self.at(num_requests)
        first, slope = (base - plain) / plain, slope / plain
        scale = seconds / (1.0 + (first + slope * num_draft_tokens if num_draft_tokens else 0.0))
        return LinearCost(
            [scale, first * scale, slope * scale],
            [0.5 * scale, 0.2 * scale, max(slope, _ASSUMED_SLOPE) * scale],
            [0.002 * scale, 0.002 * scale, 0.02 * max(slope, _ASSUMED_SLOPE) * scale],
        )


def warm_up() -> None:
    """Compiles the kernels: no request waits for that."""
    cost = LinearCost([1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    cost.observe([1.0, 0.0, 0.0], cost.deviation([1.0, 0.0, 0.0]))


def size_of(num_requests: int) -> int:
    """A number for about so many requests: 0 for one, and two more for each doubling."""
    return round(2 * math.log2(max(num_requests, 1)))


def _features(num_draft_tokens: int) -> tuple[float, float, float]:
    return 1.0, float(num_draft_tokens > 0), float(num_draft_tokens)


@kernel
def _variance(covariance: Float64Array, features: Float64Array) -> float:
    total = 0.0
    for i in range(3):
        for j in range(3):
            total += features[i] * covariance[i, j] * features[j]
    return total


@kernel
def _update(mean, covariance, drift, noise, features, seconds):  # type: ignore[no-untyped-def]
    """One step of the filter, with the innovation clipped (Huber)."""
    for i in range(3):
        covariance[i, i] += drift[i]
        for j in range(3):
            covariance[i, j] += _COMMON_DRIFT**2 * mean[i] * mean[j]
    gain = np.zeros(3)
    predicted = variance = 0.0
    for i in range(3):
        predicted += mean[i] * features[i]
        for j in range(3):
            gain[i] += covariance[i, j] * features[j]
        variance += features[i] * gain[i]
    scale = max(predicted, 0.1 * seconds)
    variance += (noise[0] * scale) ** 2
    error = seconds - predicted
    most = _CLIP * np.sqrt(variance)
    if abs(error) <= most:
        noise[1] = 0.0
    else:
        sign = 1.0 if error > 0 else -1.0
        noise[1] = noise[1] + sign if noise[1] * sign >= 0 else sign
        if abs(noise[1]) >= _CHANGED_AFTER:  # everything may have changed
            noise[1] = 0.0
            change = (error / scale) ** 2
            for i in range(3):
                covariance[i, i] += change * mean[i] ** 2
                for j in range(3):
                    covariance[i, j] += change * mean[i] * mean[j]
        error = sign * most
    noise[0] += 0.05 * (min(max(abs(error) / scale, _LEAST_NOISE), _MOST_NOISE) - noise[0])
    for i in range(3):
        mean[i] += gain[i] / variance * error
        for j in range(3):
            covariance[i, j] -= gain[i] * gain[j] / variance
    for i in range(3):
        if mean[i] < 0.0 and covariance[i, i] > 0.0:  # what the others are, if this one is 0
            mean -= covariance[:, i] / covariance[i, i] * mean[i]
