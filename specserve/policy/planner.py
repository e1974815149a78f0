"""The plan of a step: whose draft each request sends, and how long, for most tokens a second.

One step of n requests with m draft tokens takes ``base + slope m`` seconds and writes n tokens and
those that are accepted. The best choice maximises

    rate = (n + expected accepted tokens) / (base + slope m)

This is fractional programming (Dinkelbach, On Nonlinear Fractional Programming, 1967); SmartSpec
(arXiv 2406.14066) calls the quantity goodput. At a price of ``rate`` tokens a second a draft token
is worth ``survival - rate slope``: its probability of being accepted, less the tokens that its time
would have brought elsewhere. Each request takes the source whose draft is worth most, cut where
that falls to 0. The rate that comes of it is the next price; it converges in a few rounds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specserve.core.compile import inner, kernel
from specserve.core.types import Float64Array, Int32Array

LEAST_GAIN = 0.02
"""Drafts must promise this share of the plain rate more: below it noise decides."""

PROBE_TOKENS, PROBE_HOPE = 3, 0.5
"""Longest draft that is sent only to learn from it, and the least share of it that is expected to
be accepted. Whether a draft is right is seen without sending it; what is learned is its cost."""

_ROUNDS = 6


class Costs(NamedTuple):
    """Of a step's size: seconds of a plain step, of one with drafts but for their tokens, of a
    draft token."""

    plain: float
    base: float
    slope: float


class Plan(NamedTuple):
    """What a step sends, and what is expected of it.

    Attributes:
        source: int32 ``[>= n]``, index of the source whose draft is sent; -1: none.
        lengths: int32 ``[>= n]``, draft tokens.
        values: float64 ``[>= n]``, what each request's draft is worth, in tokens.
        credits: float64 ``[S]``, tokens that each source brings beyond those ranked before it.
    """

    source: Int32Array
    lengths: Int32Array
    values: Float64Array
    credits: Float64Array

    @classmethod
    def empty(cls, num_requests: int, num_sources: int) -> Plan:
        """With room for so many requests."""
        source, lengths = np.zeros((2, num_requests), np.int32)
        return cls(source, lengths, np.zeros(num_requests), np.zeros(num_sources))


@inner
def plan(survival, lengths, n, costs, rank, fixed, most, found):  # type: ignore[no-untyped-def]
    """The choice of sources and lengths that brings most tokens a second.

    Args:
        survival: float64 ``[S, >= n, k]``, probability that each draft token is accepted with all
            before it; falling along a draft.
        lengths: int32 ``[S, >= n]``, tokens of each draft.
        n: number of requests.
        costs: of a step of n requests.
        rank: int64 ``[S]``, the sources in the order in which they are credited; of equally good
            drafts the first one's is taken.
        fixed: bool ``[S]``, sources whose drafts are sent whole where they are taken, and for which
            a request that has one always takes a draft.
        most: draft tokens of the step at most, but for fixed ones; the first requests have them.
        found: a :class:`Plan`, written.

    Returns:
        (number of draft tokens; expected tokens a second; by how much that is more than without
        drafts, as a share, 0 where none are sent).
    """
    plain, base, slope = costs
    source, chosen, values, credits = found
    plain_rate = rate = n / plain
    num_tokens, expected = 0, 0.0
    credits[:] = 0.0
    for _ in range(_ROUNDS):
        num_tokens, expected = _choose(
            survival, lengths, n, rank, fixed, rate * slope, most, source, chosen, values
        )
        before = rate
        rate = (n + expected) / (base + slope * num_tokens) if num_tokens else plain_rate
        if abs(rate - before) <= 1e-6 * before:
            break
    if num_tokens and rate < (1.0 + LEAST_GAIN) * plain_rate:
        num_tokens, expected = _choose(
            survival, lengths, n, rank, fixed, rate * slope, 0, source, chosen, values
        )
        rate = (n + expected) / (base + slope * num_tokens) if num_tokens else plain_rate
    if num_tokens:
        _credit(survival, lengths, n, rank, rate * slope, rate * (base - plain), values, credits)
    gain = rate / plain_rate - 1.0 if num_tokens else 0.0
    return num_tokens, rate, gain


@inner
def _worth(survival, length, price, is_fixed):  # type: ignore[no-untyped-def]
    """What a draft is worth in tokens, how many of its tokens are sent, how many are expected."""
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
    survival, lengths, n, rank, fixed, price, most, source, chosen, values
):
    """Each request's best draft at a price of a draft token; the first ones' up to ``most``."""
    num_tokens, total = 0, 0.0
    for row in range(n):
        best, best_source, best_count, best_expected = 0.0, -1, 0, 0.0
        for each in rank:
            length = lengths[each, row]
            if not fixed[each]:
                length = min(length, max(most - num_tokens, 0))
            value, count, expected = _worth(survival[each, row], length, price, fixed[each])
            must = fixed[each] and best_source < 0
            if count and (value > best or must):
                best, best_source, best_count, best_expected = value, each, count, expected
        source[row], chosen[row], values[row] = best_source, best_count, best
        num_tokens += best_count
        total += best_expected
    return num_tokens, total


@inner
def _credit(survival, lengths, n, rank, price, overhead, values, credits):  # type: ignore[no-untyped-def]
    """What each source brings beyond those before it, less its share of what any draft costs."""
    total = 0.0
    for row in range(n):
        best = 0.0
        for each in rank:
            value, _, _ = _worth(survival[each, row], lengths[each, row], price, False)
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
    """The beginnings of drafts that are likely to be right, to see what verifying them costs.

    Takes what :func:`plan` does; writes sources and lengths of what it found.

    Returns:
        (number of draft tokens, how many of them are expected to be accepted).
    """
    num_tokens, expected = 0, 0.0
    for row in range(n):
        best = 0.0
        found.source[row], found.lengths[row] = -1, 0
        for each in range(lengths.shape[0]):
            count, total = min(lengths[each, row], PROBE_TOKENS), 0.0
            for j in range(count):
                total += survival[each, row, j]
            if total > PROBE_HOPE * count and total > best:
                best, found.source[row], found.lengths[row] = total, each, count
        expected += best
        num_tokens += found.lengths[row]
    return num_tokens, expected


@kernel
def plan_call(  # type: ignore[no-untyped-def]
    unseen, limits, values, costs, call, rate, is_drafting, waits_s, saved_s, asked
):
    """Which requests a remote source is asked for, and how long drafts.

    Those whose expected improvement over the drafts that there are exceeds the call's time. Reading
    a text that the source does not know yet is paid once, when what its drafts would have saved so
    far equals it: then it costs at most twice what knowing the end of the text would have (ski
    rental: Karlin et al., Competitive Snoopy Caching, 1988).

    Args:
        unseen: float64 ``[>= n, k]``, survival of the source's drafts by position.
        limits: int32 ``[n]``, longest draft of use; 0: none.
        values: float64 ``[n]``, worth of the drafts that there are, in tokens.
        costs: of a step.
        call: seconds of a call, of each row of it, of each token of the longest draft.
        rate: tokens a second without the call.
        is_drafting: whether the step sends drafts without it.
        waits_s: float64 ``[n]``, see :meth:`RemoteSource.reading_s`.
        saved_s: float64 ``[n]``, seconds that drafts would have saved each text that is not read;
            what this step would have is added.
        asked: int32 ``[n]``, zeros; written: the lengths to ask for. All 0: it is not asked.

    Returns:
        The tokens that the call is expected to bring beyond its price.
    """
    (plain, base, slope), (call_s, row_s, token_s) = costs, call
    price, overhead = rate * slope, 0.0 if is_drafting else rate * (base - plain)
    n, most = limits.shape[0], 0
    for row in range(n):
        most = max(most, limits[row])
    best, best_length, length = 0.0, 0, 1
    while True:
        surplus = -overhead - rate * (call_s + token_s * length)
        for row in range(n):
            if waits_s[row] < np.inf:  # false for NaN too
                gain = _improvement(unseen[row], min(length, limits[row]), price)
                surplus += max(gain - values[row] - rate * row_s, 0.0)
        if surplus > best:
            best, best_length = surplus, length
        if length >= most:
            break
        length = min(2 * length, most)
    if best <= LEAST_GAIN * n:
        return 0.0
    surplus = -overhead - rate * (call_s + token_s * best_length)
    for row in range(n):
        if not waits_s[row] < np.inf:
            continue
        gain = _improvement(unseen[row], min(best_length, limits[row]), price)
        gain -= values[row] + rate * row_s
        if gain > 0.0:
            if waits_s[row] > 0.0:
                saved_s[row] += gain / rate
            if waits_s[row] <= saved_s[row]:
                asked[row] = min(best_length, limits[row])
                if waits_s[row] == 0.0:
                    surplus += gain
    if surplus > LEAST_GAIN * n:
        return surplus
    # Those that can be answered do not pay for a call alone. Nobody waits for a text to be read.
    for row in range(n):
        if waits_s[row] == 0.0:
            asked[row] = 0
    return 0.0


@inner
def _improvement(unseen, limit, price):  # type: ignore[no-untyped-def]
    """What a draft of ``limit`` tokens is worth that is not there yet."""
    gain = 0.0
    for j in range(limit):
        gain += max(unseen[j] - price, 0.0)
    return gain
