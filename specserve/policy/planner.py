"""Plans a step: the source and length of each request's draft, for the highest output rate.

A step of n requests with m draft tokens takes ``base + slope m`` seconds. It writes n tokens and
the accepted draft tokens. The plan maximises the goodput of SmartSpec (arXiv 2406.14066):

    rate = (n + expected accepted tokens) / (base + slope m)

The method is Dinkelbach's (On Nonlinear Fractional Programming, 1967). For a trial rate, the value
of a draft token is ``survival - rate slope``: its probability of being accepted, less the tokens
that the trial rate gives in its time. A draft is cut where this value falls to 0. Each request
takes the draft with the highest sum of values. The plan's rate is the next trial rate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specserve.core.compile import inner, kernel
from specserve.core.types import Float64Array, Int32Array

MIN_GAIN = 0.02
"""Least expected gain of drafts, as a share of the plain rate. Smaller gains are lost in noise."""

PROBE_TOKENS, MIN_PROBE_ACCEPTANCE = 3, 0.5
"""Longest draft in tokens that is sent to measure the cost of drafts, and the share of it that must
be expected to be accepted. Acceptance itself is learned without sending drafts."""

_ROUNDS = 6  # most trial rates of a plan


class Costs(NamedTuple):
    """Seconds of a plain step, of a step with drafts without its draft tokens, of a draft token."""

    plain: float
    base: float
    slope: float


class Plan(NamedTuple):
    """The drafts that a step sends, and their expected value.

    Attributes:
        source: int32 ``[>= n]``, index of the source whose draft is sent; -1: none.
        lengths: int32 ``[>= n]``, draft tokens that are sent.
        values: float64 ``[>= n]``, value of each request's draft, in tokens.
        credits: float64 ``[S]``, tokens that each source adds to the sources ranked before it.
    """

    source: Int32Array
    lengths: Int32Array
    values: Float64Array
    credits: Float64Array

    @classmethod
    def empty(cls, num_requests: int, num_sources: int) -> Plan:
        """A plan of zeros for up to ``num_requests`` requests."""
        source, lengths = np.zeros((2, num_requests), np.int32)
        return cls(source, lengths, np.zeros(num_requests), np.zeros(num_sources))


@inner
def plan(survival, lengths, n, num_requests, costs, rank, fixed, found):  # type: ignore[no-untyped-def]
    """Chooses the sources and draft lengths with the highest rate of output tokens.

    Args:
        survival: float64 ``[S, >= n, k]``, probability that a draft token and all before it in the
            draft are accepted; it falls along a draft.
        lengths: int32 ``[S, >= n]``, tokens of each draft.
        n: number of requests to plan for.
        num_requests: number of requests in the step. Those beyond n get no draft.
        costs: of a step of ``num_requests`` requests.
        rank: int64 ``[S]``, the sources in the order of credits. Of drafts with equal value, the
            first source's is taken.
        fixed: bool ``[S]``, sources whose drafts are never cut. A request that has such a draft
            always sends a draft.
        found: a :class:`Plan`, written.

    Returns:
        (number of draft tokens; expected tokens per second; expected gain over the plain rate, as a
        share of it, 0 if no draft is sent).
    """
    plain, base, slope = costs
    source, chosen, values, credits = found
    plain_rate = rate = num_requests / plain
    num_tokens, expected = 0, 0.0
    credits[:] = 0.0
    for _ in range(_ROUNDS):
        num_tokens, expected = _choose(
            survival, lengths, n, rank, fixed, rate * slope, False, source, chosen, values
        )
        before = rate
        rate = _rate(num_requests, num_tokens, expected, costs)
        if abs(rate - before) <= 1e-6 * before:
            break
    if num_tokens and rate < (1.0 + MIN_GAIN) * plain_rate:
        num_tokens, expected = _choose(
            survival, lengths, n, rank, fixed, rate * slope, True, source, chosen, values
        )
        rate = _rate(num_requests, num_tokens, expected, costs)
    if num_tokens:
        _credit(survival, lengths, n, rank, rate * slope, rate * (base - plain), values, credits)
    gain = rate / plain_rate - 1.0 if num_tokens else 0.0
    return num_tokens, rate, gain


@inner
def _rate(num_requests, num_tokens, expected, costs):  # type: ignore[no-untyped-def]
    """Expected output tokens per second of a step with so many draft tokens."""
    plain, base, slope = costs
    if num_tokens == 0:
        return num_requests / plain
    return (num_requests + expected) / (base + slope * num_tokens)


@inner
def _draft_value(survival, length, price, is_fixed):  # type: ignore[no-untyped-def]
    """Value of a draft in tokens, number of tokens to send, expected accepted tokens."""
    value = expected = 0.0
    count = 0
    for j in range(length):
        if survival[j] <= price and not is_fixed:
            break
        value += survival[j] - price
        expected += survival[j]
        count += 1
    return value, count, expected


@inner
def _choose(  # type: ignore[no-untyped-def]
    survival, lengths, n, rank, fixed, price, only_fixed, source, chosen, values
):
    """Writes each request's best draft; returns numbers of draft and expected accepted tokens.

    With ``only_fixed`` no other source's drafts are sent.
    """
    num_tokens, total = 0, 0.0
    for row in range(n):
        best, best_source, best_count, best_expected = 0.0, -1, 0, 0.0
        for each in rank:
            length = lengths[each, row] if fixed[each] or not only_fixed else 0
            value, count, expected = _draft_value(survival[each, row], length, price, fixed[each])
            must = fixed[each] and best_source < 0
            if count and (value > best or must):
                best, best_source, best_count, best_expected = value, each, count, expected
        source[row], chosen[row], values[row] = best_source, best_count, best
        num_tokens += best_count
        total += best_expected
    return num_tokens, total


@inner
def _credit(survival, lengths, n, rank, price, overhead, values, credits):  # type: ignore[no-untyped-def]
    """Writes the value that each source adds, less its share of the fixed cost of having drafts."""
    total = 0.0
    for row in range(n):
        best = 0.0
        for each in rank:
            value, _, _ = _draft_value(survival[each, row], lengths[each, row], price, False)
            if value > best:
                credits[each] += value - best
                total += value - best
                best = value
    if total > 0.0:
        share = max(1.0 - overhead / total, 0.0)
        for each in range(credits.shape[0]):
            credits[each] *= share


@inner
def probe(survival, lengths, n, found):  # type: ignore[no-untyped-def]
    """Chooses short drafts that are likely to be accepted, to measure the cost of verifying drafts.

    The arguments are those of :func:`plan`. Only sources and lengths of the plan are written.

    Returns:
        (number of draft tokens, expected accepted tokens).
    """
    num_tokens, expected = 0, 0.0
    for row in range(n):
        best = 0.0
        found.source[row], found.lengths[row] = -1, 0
        for each in range(lengths.shape[0]):
            count, total = min(lengths[each, row], PROBE_TOKENS), 0.0
            for j in range(count):
                total += survival[each, row, j]
            if total > MIN_PROBE_ACCEPTANCE * count and total > best:
                best, found.source[row], found.lengths[row] = total, each, count
        expected += best
        num_tokens += found.lengths[row]
    return num_tokens, expected


@kernel
def plan_call(  # type: ignore[no-untyped-def]
    unseen, limits, values, costs, call, rate, is_drafting, waits_s, saved_s, asked
):
    """Chooses the requests for which a remote source is asked, and their draft lengths.

    A request is asked for if its expected gain over the offered drafts exceeds its cost, and the
    gains of all such requests exceed the call's. A text that the source has not read is sent once
    its drafts would have saved as much time as reading takes. This costs at most twice the optimum
    with a known end of the text (ski rental: Karlin et al., Competitive Snoopy Caching, 1988).

    Args:
        unseen: float64 ``[>= n, k]``, survival of the source's drafts by position.
        limits: int32 ``[n]``, longest draft that each request can use; 0: none.
        values: float64 ``[n]``, value of the offered drafts, in tokens.
        costs: of a step.
        call: seconds of a call, of each row of it, of each token of the longest draft.
        rate: expected output tokens per second without the call.
        is_drafting: whether the step sends drafts without the call.
        waits_s: float64 ``[n]``, see :meth:`RemoteSource.reading_s`.
        saved_s: float64 ``[n]``, updated: seconds that drafts would have saved each unread text.
        asked: int32 ``[n]``, zeros; written: the lengths to ask for, 0: none.

    Returns:
        Expected gain of the call in tokens beyond its cost; 0.0 if it does not pay.
    """
    (plain, base, slope), (call_s, row_s, token_s) = costs, call
    price, fee = rate * slope, rate * row_s
    overhead = 0.0 if is_drafting else rate * (base - plain)
    n, most = limits.shape[0], 0
    for row in range(n):
        most = max(most, limits[row])
    best, best_length, length = 0.0, 0, 1
    while True:
        surplus = -overhead - rate * (call_s + token_s * length)
        for row in range(n):
            surplus += _gain(row, length, unseen, limits, values, waits_s, price, fee)
        if surplus > best:
            best, best_length = surplus, length
        if length >= most:
            break
        length = min(2 * length, most)
    if best <= MIN_GAIN * n:
        return 0.0
    surplus = -overhead - rate * (call_s + token_s * best_length)
    for row in range(n):
        gain = _gain(row, best_length, unseen, limits, values, waits_s, price, fee)
        if gain > 0.0:
            if waits_s[row] > 0.0:
                saved_s[row] += gain / rate
            if waits_s[row] <= saved_s[row]:
                asked[row] = min(best_length, limits[row])
                if waits_s[row] == 0.0:
                    surplus += gain
    if surplus > MIN_GAIN * n:
        return surplus
    # Requests that can be answered now do not pay for the call. No step waits for texts to be read.
    for row in range(n):
        if waits_s[row] == 0.0:
            asked[row] = 0
    return 0.0


@inner
def _gain(row, length, unseen, limits, values, waits_s, price, fee):  # type: ignore[no-untyped-def]
    """Gain in tokens if a draft of at most ``length`` tokens is asked for; 0.0: it does not pay."""
    if not waits_s[row] < np.inf:  # true for NaN too
        return 0.0
    gain = -values[row] - fee
    for j in range(min(length, limits[row])):
        gain += max(unseen[row, j] - price, 0.0)
    return max(gain, 0.0)
