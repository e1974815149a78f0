"""What a decoding step costs, learned while serving: with drafts, without, and per draft token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low

import numpy as np

from specserve.proposers.line import KEPT_AT_CHANGE, MEMORY, Clip, Line

ASSUMED_TOKEN_SHARE = 0.01
"""Cost of a draft token as a share of a plain step, until steps with drafts were measured."""

CALIBRATION_STEPS = 3
"""Plain steps that are measured before any other."""

_SIZES_PER_DOUBLING, _NEAR_SIZES = 2, 2
_CONTEXT_UNIT = 1000.0
_SLOPE_PRIOR, _SLOPE_TOLERANCE, _MOST_CORRECTION = 16.0, 0.1, 2.0
_STALE_AFTER, _LEAST_BASE = 32, 0.5
_ALL_MEASURED, _MEASURE_EVERY = 64, 4


class StepCost:
    """The cost of steps of ``n`` requests with ``d`` draft tokens, by the size of ``n``.

    Plain steps are measured for each size apart, two sizes to a doubling of ``n``, with straight
    lines between them; each token of the requests' texts, which attention reads, costs the same at
    all sizes. A step with drafts costs so many plain ones of its ``n``, as a line in ``d`` and in
    ``d`` times the texts' length for each size: an engine skips work in a step where no request
    has a draft, so that a first draft token costs more than the next one. A size that was not
    measured takes over what is known of the nearest; where no steps with drafts were, they cost as
    plain ones and ``ASSUMED_TOKEN_SHARE`` a token. What is known of one size does not fade while
    others run.

    Attributes:
        context: mean length, in tokens, of the texts of the step that is asked about; the caller
            keeps it up to date.
        most_draft_tokens: of all steps measured so far; the lines are not to be trusted far beyond.
    """

    def __init__(self) -> None:
        self.context = 0.0
        self.most_draft_tokens = 0
        self._plain: dict[int, _PlainSteps] = {}
        self._spec: dict[int, Line] = {}
        self._num_plain: dict[int, int] = {}  # steps of a size since its last one with drafts
        self._points: list[tuple[float, float, float]] = []
        self._slope = _ContextSlope()
        self._expected_slope = 0.0

    def observe(self, num_requests: int, num_draft_tokens: int, seconds: float) -> None:
        """One step, with texts of ``context``; ``seconds`` greater than 0, else it is ignored."""
        if seconds <= 0 or num_requests <= 0:
            return
        size = size_of(num_requests)
        if not num_draft_tokens:
            self._num_plain[size] = self._num_plain.get(size, 0) + 1
            steps = self._plain.setdefault(size, _PlainSteps(self._slope))
            if steps.add(num_requests, self.context, seconds):
                known = self._plain.values()
                self._points = sorted((each.requests, each.seconds, each.context) for each in known)
                self._expect_slope()
        elif self._points:
            if size in self._plain:
                self._plain[size].num_steps_since += 1
            self.most_draft_tokens = max(self.most_draft_tokens, num_draft_tokens)
            plain = self._plain_seconds(num_requests)
            if size not in self._spec:
                precision = 50.0 / plain**2
                prior = np.array(self._coefficients(size, plain))
                self._spec[size] = Line(prior, np.array([1.0, precision, precision]))
                self._spec[size].expect_last(*self._of_context())
            self._spec[size].fade(self._num_plain.pop(size, 0))
            # In plain steps, so that the errors of short and long steps weigh alike.
            tokens = num_draft_tokens / plain
            features = 1.0, tokens, tokens * self.context / _CONTEXT_UNIT
            self._spec[size].add(features, seconds / plain)

    def _expect_slope(self) -> None:
        """Has the lines know what was learned of the texts' length by plain steps."""
        change = abs(self._slope.seconds - self._expected_slope)
        if change > _SLOPE_TOLERANCE * self._expected_slope:
            self._expected_slope = self._slope.seconds
            for line in self._spec.values():
                line.expect_last(*self._of_context())

    def _of_context(self) -> tuple[float, float]:
        """What to expect of a draft token's cost for each thousand tokens of text, and its most.

        It reads the text once more at most, as a request of its own would; where a request's
        tokens are verified together, hardly anything.
        """
        return _CONTEXT_UNIT * self._expected_slope / 2, _CONTEXT_UNIT * self._slope.most

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
        plain, size = self.plain(num_requests), size_of(num_requests)
        base, token, of_context = self._coefficients(size, plain)
        token += of_context * self.context / _CONTEXT_UNIT
        with_drafts = plain * base
        if size in self._plain and self._plain[size].num_steps_since >= _STALE_AFTER:
            # Drafts have paid for long. Now a plain step costs no more than a step with them.
            plain = min(plain, max(with_drafts, _LEAST_BASE * plain))
        return plain, max(with_drafts, plain), max(token, 0.0)

    def plain(self, num_requests: int) -> float:
        """What a step without drafts was measured to cost, in seconds."""
        return self._plain_seconds(num_requests) if self._points else 1.0

    def _coefficients(self, size: int, plain: float) -> Sequence[float]:
        """Of a step with drafts, see :class:`Line`: in plain steps; of a draft token in seconds;
        of a draft token for each thousand tokens of its text in seconds."""
        if not self._spec:
            return 1.0, ASSUMED_TOKEN_SHARE * plain, 0.0
        near = min(self._spec, key=lambda each: (abs(each - size), each))
        return self._spec[near].coefficients

    def _plain_seconds(self, num_requests: float) -> float:
        """Between the measured points, and a little beyond them."""
        points = self._points
        right = 1
        while right < len(points) - 1 and points[right][0] < num_requests:
            right += 1
        low, low_s, low_context = points[right - 1]
        high, high_s, high_context = points[min(right, len(points) - 1)]  # of one point: the same
        share = (num_requests - low) / (high - low) if high > low else 0.0
        measured = max(low_s + (high_s - low_s) * share, 0.1 * min(low_s, high_s))
        # What attention adds grows with requests times length, the rest with requests alone.
        slope = self._slope.seconds
        low_s, high_s = low_s - slope * low * low_context, high_s - slope * high * high_context
        seconds = low_s + (high_s - low_s) * share + slope * num_requests * self.context
        return min(max(seconds, measured / _MOST_CORRECTION), measured * _MOST_CORRECTION)


def size_of(num_requests: int) -> int:
    """A number for about so many requests: 0 for one, and two more for each doubling."""
    return round(_SIZES_PER_DOUBLING * math.log2(num_requests))


class _ContextSlope:
    """What a token of a request's text adds to a plain step, by how steps of one size differed.

    Attributes:
        seconds: of a token; where lengths differed little, rather too few.
        most: the same without much caution.
    """

    def __init__(self) -> None:
        self.seconds = self.most = 0.0
        self._squares = self._products = 0.0

    def add(self, num_requests: int, mean_context: float, context: float, excess: float) -> None:
        """One step.

        Args:
            num_requests: in the step.
            mean_context: of the steps of its size so far.
            context: of its texts.
            excess: seconds that it took longer than those in the mean.
        """
        # In tenths of the usual tokens, so that small and large steps weigh alike.
        tenth = 0.1 * num_requests * max(mean_context, 1.0)
        longer, excess = num_requests * (context - mean_context) / tenth, excess / tenth
        self._squares = MEMORY * self._squares + longer**2
        self._products = MEMORY * self._products + longer * excess
        self.seconds = max(self._products / (self._squares + _SLOPE_PRIOR), 0.0)
        self.most = max(self._products / (self._squares + 1.0), 0.0)


class _PlainSteps:
    """Typical plain steps of one size.

    Args:
        slope: what longer texts cost, at all sizes.

    Attributes:
        count: how many were measured.
        requests: in them, in the mean.
        seconds: of one.
        context: mean length of their texts.
        num_steps_since: steps of this size with drafts since the last one without.
    """

    def __init__(self, slope: _ContextSlope) -> None:
        self.count = self.num_steps_since = 0
        self._evidence = 0.0
        self.requests = self.seconds = self.context = 0.0
        self._slope = slope
        self._first: list[float] = []
        self._clip = Clip()

    def add(self, num_requests: int, context: float, seconds: float) -> bool:
        """One step; false: it was passed over, as most are where many were measured."""
        self.count += 1
        is_rare = self.num_steps_since > 0
        if self.count > _ALL_MEASURED and self.count % _MEASURE_EVERY and not is_rare:
            return False
        self._evidence = self._evidence * MEMORY ** (1 + self.num_steps_since) + 1
        self.num_steps_since, weight = 0, 1 / self._evidence
        if self.count <= CALIBRATION_STEPS:
            # The very first steps may compile, warm caches, or run beside a drafter that reads the
            # prompts: of two the faster one is trusted, of three the median.
            self._first.append(seconds)
            self.seconds = median_low(self._first)
        else:
            longer = num_requests * (context - self.context)
            expected = self.seconds + self._slope.seconds * longer
            seconds, has_changed = self._clip(max(expected, 0.1 * self.seconds), seconds)
            if has_changed:
                self._evidence, weight = 1.0, 1 - KEPT_AT_CHANGE
            excess = seconds - self.seconds
            self._slope.add(num_requests, self.context, context, excess)
            self.seconds += weight * excess
        self.requests += weight * (num_requests - self.requests)
        self.context += weight * (context - self.context)
        return True
