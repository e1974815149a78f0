"""What decoding steps and calls of drafters cost, learned while serving.

A cost is linear in three features. Its coefficients are tracked by a Kalman filter in which they
drift, each by itself and all together: longer texts, or another load, make everything dearer. The
variance of a coefficient grows while nothing is measured that depends on it, so that the filter
also tells what is not known well enough any more.

The state of a filter is a line: float64 ``[NUM_COLUMNS]``.
"""

from __future__ import annotations

import math

import numpy as np

from specserve.core.compile import direct, inner, kernel
from specserve.core.types import Float64Array

CALIBRATION_STEPS = 3
"""Plain steps of about so many requests that are measured before drafts are sent."""

_ASSUMED_SLOPE = 0.01
"""Cost of a draft token in plain steps, before any was measured."""

_SHARES = np.array([0.1, 0.01, 0.1])
"""Of a plain step: what a call takes, each request and each token, before one was measured."""

_NUM_SIZES = 40
_NEAR_SIZES = 2
_TOO_SHORT = 2.0
_LEAST_S = 1e-6
_CHANGED_AFTER = 3
_LEAST_NOISE, _MOST_NOISE = 0.01, 0.3
_CLIP = 3.0
_COMMON_DRIFT = 0.005
_LEAST_DRIFT = (0.002, 0.002, 0.0002)
"""Of the three coefficients of a step, from one measurement to the next, in plain steps."""

_MEAN, _DRIFT, _GAIN, _COVARIANCE = 0, 3, 6, 9
_NOISE, _CLIPPED, _NUM_MEASURED, _NUM_PLAIN, NUM_COLUMNS = 18, 19, 20, 21, 22
"""Columns of a line: coefficients, their drift (a variance), scratch, their covariance; relative
noise, clipped measurements in a row (signed), measurements, those of plain steps."""


class CallCost:
    """Seconds of a drafter's call: of itself, of each request, of each token of the longest draft.

    Before the first call they are shares of a plain step.
    """

    def __init__(self) -> None:
        self._line: Float64Array = np.zeros(NUM_COLUMNS)
        three = 1.0, 1.0, 1.0
        self._reset = direct(_reset, self._line, three, three, three)
        self._update = direct(_update, self._line, three, 1.0)

    def coefficients(self, plain_s: float) -> tuple[float, float, float]:
        """Now, in seconds, where a plain step takes ``plain_s``; none is below 0."""
        is_measured = self._line[_NUM_MEASURED] > 0.0
        found = self._line[_MEAN : _MEAN + 3] if is_measured else _SHARES * plain_s
        call, request, token = np.maximum(found, 0.0).tolist()
        return call, request, token

    @property
    def covariance(self) -> Float64Array:
        """float64 ``[3, 3]``, of the coefficients."""
        return self._line[_COVARIANCE : _COVARIANCE + 9].reshape(3, 3)

    def observe(self, num_requests: int, longest: int, seconds: float, plain_s: float) -> None:
        """One measurement; of one that is far off, only a part is believed.

        Several in a row that are far off in the same direction say that the cost has changed. What
        took no time that could be measured is ignored.
        """
        if seconds <= 0.0:
            return
        features = 1.0, float(num_requests), float(longest)
        if self._line[_NUM_MEASURED] == 0.0:
            # By the call itself, where plain steps are dearer or not known yet.
            prior = _SHARES * min(plain_s, seconds / float(_SHARES @ features))
            self._reset(
                self._line, *(tuple(each.tolist()) for each in (prior, 2 * prior, prior / 50))
            )
        self._update(self._line, features, seconds)


class StepCost:
    """The cost of steps of n requests with m draft tokens: ``plain + (base - plain + slope m)``.

    By the size of n, two sizes to a doubling. An engine skips work in a step where no request has a
    draft, so that the first draft token costs more than the next one. A size that was not measured
    takes over what is known of the nearest.

    Attributes:
        lines: float64 ``[sizes, NUM_COLUMNS]``, for kernels.
        most_draft_tokens: of all steps measured so far: beyond, the lines are not to be trusted.
    """

    def __init__(self) -> None:
        self.lines: Float64Array = np.zeros((_NUM_SIZES, NUM_COLUMNS))
        self.most_draft_tokens = 0
        self._observe = direct(_observe_step, self.lines, 1, 0, 1.0)

    def observe(self, num_requests: int, num_draft_tokens: int, seconds: float) -> None:
        """A step that decoded ``num_requests`` requests and did nothing else.

        Args:
            num_requests: each had one token and its draft verified.
            num_draft_tokens: of all requests together.
            seconds: from the end of the drafting before the step to the tokens that it sampled:
                scheduling and sampling are in it, drafting is not. More than 0, else it is ignored.
        """
        if seconds <= 0 or num_requests <= 0:
            return
        self._observe(self.lines, num_requests, num_draft_tokens, seconds)
        self.most_draft_tokens = max(self.most_draft_tokens, num_draft_tokens)


@inner
def size_of(num_requests):  # type: ignore[no-untyped-def]
    """A number for about so many requests: 0 for one, and two more for each doubling."""
    return min(round(2.0 * math.log2(max(num_requests, 1))), _NUM_SIZES - 1)


@kernel
def is_calibrated(lines, num_requests):  # type: ignore[no-untyped-def]
    """Whether enough plain steps of about so many requests were measured to compare with."""
    size, num_plain = size_of(num_requests), 0.0
    for each in range(max(size - _NEAR_SIZES, 0), min(size + _NEAR_SIZES + 1, lines.shape[0])):
        num_plain += lines[each, _NUM_PLAIN]
    return num_plain >= CALIBRATION_STEPS


@kernel
def costs_of(lines, num_requests):  # type: ignore[no-untyped-def]
    """Seconds of a plain step, of one with drafts but for their tokens, of each draft token.

    Before the first measurement a plain step counts as one second: only ratios matter.
    """
    size = _nearest(lines, num_requests)
    if size < 0:
        return 1.0, 1.0, _ASSUMED_SLOPE
    plain = max(lines[size, _MEAN], _LEAST_S)
    first, slope = lines[size, _MEAN + 1], lines[size, _MEAN + 2]
    return plain, plain + max(first, 0.0), max(slope, 1e-4 * plain)


@kernel
def doubt_about(lines, num_requests, num_draft_tokens):  # type: ignore[no-untyped-def]
    """Standard deviation, in seconds, of what such a step costs beyond a plain one."""
    size = _nearest(lines, num_requests)
    if size < 0:
        return 0.0
    of_any, of_both = lines[size, _COVARIANCE + 4], lines[size, _COVARIANCE + 5]
    of_each = lines[size, _COVARIANCE + 8]
    variance = of_any + num_draft_tokens * (2.0 * of_both + num_draft_tokens * of_each)
    return math.sqrt(max(variance, 0.0))


@inner
def _nearest(lines, num_requests):  # type: ignore[no-untyped-def]
    """The size that was measured, or the nearest such one; -1: none was."""
    size = size_of(num_requests)
    for distance in range(lines.shape[0]):
        if size >= distance and lines[size - distance, _NUM_MEASURED] > 0.0:
            return size - distance
        if size + distance < lines.shape[0] and lines[size + distance, _NUM_MEASURED] > 0.0:
            return size + distance
    return -1


@kernel
def _reset(line, prior, deviation, drift):  # type: ignore[no-untyped-def]
    line[:] = 0.0
    line[_NOISE] = 0.05
    for i in range(3):
        line[_MEAN + i] = prior[i]
        line[_DRIFT + i] = drift[i] ** 2
        line[_COVARIANCE + 4 * i] = deviation[i] ** 2


@inner
def _new_size(lines, size, num_requests, num_draft_tokens, seconds):  # type: ignore[no-untyped-def]
    """A size that is measured for the first time: by its first step and its neighbours' ratios."""
    plain, base, slope = costs_of(lines, num_requests)
    first, slope = (base - plain) / plain, slope / plain
    scale = seconds
    if num_draft_tokens:
        scale /= 1.0 + first + slope * num_draft_tokens
    unsure = max(slope, _ASSUMED_SLOPE) * scale
    prior = (scale, first * scale, slope * scale)
    deviation = (0.5 * scale, 0.2 * scale, unsure)
    drift = (_LEAST_DRIFT[0] * scale, _LEAST_DRIFT[1] * scale, 0.02 * unsure)
    _reset(lines[size], prior, deviation, drift)


@inner
def _keep_drifting(line):  # type: ignore[no-untyped-def]
    """No coefficient is believed for ever, however small it and its drift have become."""
    for i in range(3):
        least = _LEAST_DRIFT[i] * line[_MEAN]
        line[_DRIFT + i] = max(line[_DRIFT + i], least * least)


@inner
def _scale(line, factor):  # type: ignore[no-untyped-def]
    """Everything costs so many times what was believed, and is as uncertain relative to it."""
    for i in range(3):
        line[_MEAN + i] *= factor
        line[_DRIFT + i] *= factor**2
    for i in range(9):
        line[_COVARIANCE + i] *= factor**2


@kernel
def _update(line, features, seconds):  # type: ignore[no-untyped-def]
    """One step of the filter, with the innovation clipped (Huber)."""
    mean, gain = line[_MEAN : _MEAN + 3], line[_GAIN : _GAIN + 3]
    covariance = line[_COVARIANCE : _COVARIANCE + 9].reshape(3, 3)
    predicted = variance = 0.0
    for i in range(3):
        covariance[i, i] += line[_DRIFT + i]
        for j in range(3):
            covariance[i, j] += _COMMON_DRIFT**2 * mean[i] * mean[j]
    for i in range(3):
        gain[i] = 0.0
        for j in range(3):
            gain[i] += covariance[i, j] * features[j]
        predicted += mean[i] * features[i]
        variance += features[i] * gain[i]
    scale = max(predicted, 0.1 * seconds)
    variance += (line[_NOISE] * scale) ** 2
    error = seconds - predicted
    most = _CLIP * math.sqrt(variance)
    if abs(error) <= most:
        line[_CLIPPED] = 0.0
    else:
        sign = 1.0 if error > 0 else -1.0
        line[_CLIPPED] = line[_CLIPPED] + sign if line[_CLIPPED] * sign >= 0 else sign
        if abs(line[_CLIPPED]) >= _CHANGED_AFTER:  # everything may have changed
            line[_CLIPPED] = 0.0
            change = (error / scale) ** 2
            for i in range(3):
                covariance[i, i] += change * mean[i] ** 2
                for j in range(3):
                    covariance[i, j] += change * mean[i] * mean[j]
        error = sign * most
    noise = min(max(abs(error) / scale, _LEAST_NOISE), _MOST_NOISE)
    line[_NOISE] += 0.05 * (noise - line[_NOISE])
    for i in range(3):
        mean[i] += gain[i] / variance * error
        for j in range(3):
            covariance[i, j] -= gain[i] * gain[j] / variance
    for i in range(3):
        if mean[i] < 0.0 and covariance[i, i] > 0.0:  # what the others are, if this one is 0
            surplus = mean[i] / covariance[i, i]
            for j in range(3):
                mean[j] -= covariance[j, i] * surplus
    line[_NUM_MEASURED] += 1.0


@kernel
def _observe_step(lines, num_requests, num_draft_tokens, seconds):  # type: ignore[no-untyped-def]
    size = size_of(num_requests)
    line = lines[size]
    if line[_NUM_MEASURED] == 0.0:
        _new_size(lines, size, num_requests, num_draft_tokens, seconds)
    _keep_drifting(line)
    any_draft = 1.0 if num_draft_tokens else 0.0
    believed = line[_MEAN] + any_draft * line[_MEAN + 1] + num_draft_tokens * line[_MEAN + 2]
    if believed > _TOO_SHORT * seconds:
        # No step is that much shorter by chance. The first ones may have compiled something.
        _scale(line, seconds / believed)
    _update(line, (1.0, any_draft, float(num_draft_tokens)), seconds)
    if not num_draft_tokens:
        line[_NUM_PLAIN] += 1.0
