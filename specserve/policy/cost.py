"""Estimates the seconds of decoding steps and of drafter calls, from measurements while serving.

A cost is linear in three features. A Kalman filter tracks its coefficients. They drift, each alone
and all together, because longer texts or another load make everything slower. The variance of a
coefficient grows while no measurement depends on it. So the filter also shows what is uncertain.

The state of a filter is a line: float64 ``[NUM_COLUMNS]``.
"""

from __future__ import annotations

import math

import numpy as np

from specserve.core.compile import direct, inner, kernel
from specserve.core.types import Float64Array

CALIBRATION_STEPS = 3
"""Plain steps of about the same batch size that are measured before drafts are sent."""

_ASSUMED_SLOPE = 0.01
"""Cost of a draft token in plain steps, until one is measured."""

_SHARES = np.array([0.1, 0.01, 0.1])
"""Cost of a call, of each request and of each token in plain steps, until a call is measured."""

_NUM_SIZES = 40  # size classes
_NEAR_SIZES = 2  # size classes on each side that calibrate a batch size, too
_TOO_SHORT = 2.0  # ratio of predicted to measured time above which all coefficients are scaled
_MIN_S = 1e-6  # least seconds of a plain step
_CHANGED_AFTER = 3  # consecutive clipped measurements that count as a change
_MIN_NOISE, _MAX_NOISE = 0.01, 0.3  # bounds of one measurement's relative noise
_CLIP = 3.0  # standard deviations at which an error is clipped
_COMMON_DRIFT = 0.005  # relative, of all coefficients together, per measurement
_MIN_DRIFT = (0.002, 0.002, 0.0002)
"""Least drift of a step's three coefficients per measurement, in plain steps."""

_MEAN, _DRIFT, _GAIN, _COVARIANCE = 0, 3, 6, 9
_NOISE, _CLIPPED, _NUM_MEASURED, _NUM_PLAIN, NUM_COLUMNS = 18, 19, 20, 21, 22
"""Columns of a line: coefficients, their drift (a variance), scratch, their covariance; relative
noise; numbers of consecutive clipped measurements (signed), of measurements, of plain steps."""


class CallCost:
    """Seconds of a drafter's call, of each request in it, of each token of the longest draft.

    Until the first call is measured, the costs are shares of a plain step.
    """

    def __init__(self) -> None:
        self._line: Float64Array = np.zeros(NUM_COLUMNS)
        three = 1.0, 1.0, 1.0
        self._reset = direct(_reset, self._line, three, three, three)
        self._update = direct(_update, self._line, three, 1.0)

    def coefficients(self, plain_s: float) -> tuple[float, float, float]:
        """Seconds of a call, of a request, of a token, each >= 0; ``plain_s`` is a plain step's."""
        is_measured = self._line[_NUM_MEASURED] > 0.0
        found = self._line[_MEAN : _MEAN + 3] if is_measured else _SHARES * plain_s
        call, request, token = np.maximum(found, 0.0).tolist()
        return call, request, token

    def observe(self, num_requests: int, longest: int, seconds: float, plain_s: float) -> None:
        """Updates the costs with one call of ``seconds``; a call of 0 s is ignored.

        The error of an outlier is clipped. Consecutive outliers in the same direction raise the
        variance, because the cost has changed.
        """
        if seconds <= 0.0:
            return
        features = 1.0, float(num_requests), float(longest)
        if self._line[_NUM_MEASURED] == 0.0:
            # The call itself bounds the prior, as plain steps may be slower or not measured yet.
            prior = _SHARES * min(plain_s, seconds / float(_SHARES @ features))
            self._reset(
                self._line, *(tuple(each.tolist()) for each in (prior, 2 * prior, prior / 50))
            )
        self._update(self._line, features, seconds)


class StepCost:
    """Seconds of a step of n requests: ``plain``, or ``base + slope m`` with m draft tokens.

    There is one filter for each size class of n, with two classes per doubling. The first draft
    token costs more than the next ones, because the engine skips work in a step without drafts. A
    class that was not measured uses the nearest one.

    Attributes:
        lines: float64 ``[sizes, NUM_COLUMNS]``, for kernels.
    """

    def __init__(self) -> None:
        self.lines: Float64Array = np.zeros((_NUM_SIZES, NUM_COLUMNS))
        self._observe = direct(_observe_step, self.lines, 1, 0, 1.0)

    def observe(self, num_requests: int, num_draft_tokens: int, seconds: float) -> None:
        """Updates the costs with a step that only decoded: it read no prompt.

        Args:
            num_requests: requests of the step.
            num_draft_tokens: verified draft tokens of all requests together.
            seconds: from the end of drafting before the step to its sampled tokens, so with
                scheduling and sampling, without drafting. A step of 0 s is ignored.
        """
        if seconds <= 0 or num_requests <= 0:
            return
        self._observe(self.lines, num_requests, num_draft_tokens, seconds)


@inner
def size_of(num_requests):  # type: ignore[no-untyped-def]
    """The size class of a batch: 0 for one request, and 2 more for each doubling."""
    return min(round(2.0 * math.log2(max(num_requests, 1))), _NUM_SIZES - 1)


@kernel
def is_calibrated(lines, num_requests):  # type: ignore[no-untyped-def]
    """Whether ``CALIBRATION_STEPS`` plain steps of about this batch size were measured."""
    size, num_plain = size_of(num_requests), 0.0
    for each in range(max(size - _NEAR_SIZES, 0), min(size + _NEAR_SIZES + 1, lines.shape[0])):
        num_plain += lines[each, _NUM_PLAIN]
    return num_plain >= CALIBRATION_STEPS


@kernel
def costs_of(lines, num_requests):  # type: ignore[no-untyped-def]
    """Seconds of a plain step, of a step with drafts without its draft tokens, of a draft token.

    Until the first measurement, a plain step counts as one second: only ratios matter.
    """
    size = _nearest(lines, num_requests)
    if size < 0:
        return 1.0, 1.0, _ASSUMED_SLOPE
    plain = max(lines[size, _MEAN], _MIN_S)
    first, slope = lines[size, _MEAN + 1], lines[size, _MEAN + 2]
    return plain, plain + max(first, 0.0), max(slope, 1e-4 * plain)


@kernel
def cost_deviation(lines, num_requests, num_draft_tokens):  # type: ignore[no-untyped-def]
    """Standard deviation in seconds of the cost that the draft tokens add to a plain step."""
    size = _nearest(lines, num_requests)
    if size < 0:
        return 0.0
    of_any, of_both = lines[size, _COVARIANCE + 4], lines[size, _COVARIANCE + 5]
    of_each = lines[size, _COVARIANCE + 8]
    variance = of_any + num_draft_tokens * (2.0 * of_both + num_draft_tokens * of_each)
    return math.sqrt(max(variance, 0.0))


@inner
def _nearest(lines, num_requests):  # type: ignore[no-untyped-def]
    """The size class that was measured and is nearest to the batch's; -1: none was measured."""
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
    """Starts a size class with the first measured step, and with the nearest class's draft costs.

    These do not grow with the batch: a high estimate would prevent the drafts that correct it.
    """
    plain, base, slope = costs_of(lines, num_requests)
    scale = seconds * plain / (base + slope * num_draft_tokens) if num_draft_tokens else seconds
    shrinkage = min(scale / plain, 1.0)
    first, slope = shrinkage * (base - plain), shrinkage * slope
    slope_deviation = max(slope, _ASSUMED_SLOPE * scale)
    prior = (scale, first, slope)
    deviation = (0.5 * scale, 0.2 * scale, slope_deviation)
    drift = (_MIN_DRIFT[0] * scale, _MIN_DRIFT[1] * scale, 0.02 * slope_deviation)
    _reset(lines[size], prior, deviation, drift)


@inner
def _bound_drift(line):  # type: ignore[no-untyped-def]
    """Raises each drift to its minimum, so that even a small coefficient stays adaptable."""
    for i in range(3):
        least = _MIN_DRIFT[i] * line[_MEAN]
        line[_DRIFT + i] = max(line[_DRIFT + i], least * least)


@inner
def _scale(line, factor):  # type: ignore[no-untyped-def]
    """Multiplies all coefficients by ``factor``, with the same relative uncertainty."""
    for i in range(3):
        line[_MEAN + i] *= factor
        line[_DRIFT + i] *= factor**2
    for i in range(9):
        line[_COVARIANCE + i] *= factor**2


@kernel
def _update(line, features, seconds):  # type: ignore[no-untyped-def]
    """Updates the filter with one measurement. The innovation is clipped (Huber)."""
    mean, gain = line[_MEAN : _MEAN + 3], line[_GAIN : _GAIN + 3]
    covariance = line[_COVARIANCE : _COVARIANCE + 9].reshape(3, 3)
    predicted = variance = 0.0
    for i in range(3):
        predicted += mean[i] * features[i]
    if predicted > _TOO_SHORT * seconds:
        # Nothing is that much shorter by chance. The first step and the first call are often long.
        _scale(line, seconds / predicted)
        predicted = seconds
    for i in range(3):
        covariance[i, i] += line[_DRIFT + i]
        for j in range(3):
            covariance[i, j] += _COMMON_DRIFT**2 * mean[i] * mean[j]
    for i in range(3):
        gain[i] = 0.0
        for j in range(3):
            gain[i] += covariance[i, j] * features[j]
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
        if abs(line[_CLIPPED]) >= _CHANGED_AFTER:  # all costs may have changed
            line[_CLIPPED] = 0.0
            change = (error / scale) ** 2
            for i in range(3):
                covariance[i, i] += change * mean[i] ** 2
                for j in range(3):
                    covariance[i, j] += change * mean[i] * mean[j]
        error = sign * most
    noise = min(max(abs(error) / scale, _MIN_NOISE), _MAX_NOISE)
    line[_NOISE] += 0.05 * (noise - line[_NOISE])
    for i in range(3):
        mean[i] += gain[i] / variance * error
        for j in range(3):
            covariance[i, j] -= gain[i] * gain[j] / variance
    for i in range(3):
        if mean[i] < 0.0 and covariance[i, i] > 0.0:  # condition the others on 0 here
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
    _bound_drift(line)
    any_draft = 1.0 if num_draft_tokens else 0.0
    _update(line, (1.0, any_draft, float(num_draft_tokens)), seconds)
    if not num_draft_tokens:
        line[_NUM_PLAIN] += 1.0
