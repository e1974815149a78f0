from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

import numpy as np
import pytest

from specserve.core.compile import kernel
from specserve.core.types import Float64Array, Int32Array
from specserve.policy.planner import (
    MIN_GAIN,
    PROBE_TOKENS,
    Costs,
    Plan,
    plan,
    plan_call,
    probe,
)

CHEAP = Costs(plain=0.01, base=0.01, slope=0.0001)
DEAR = Costs(plain=0.01, base=0.012, slope=0.004)

Offers = Sequence[Sequence[Sequence[float]]]
"""Survival of each source's draft for each request; empty if it has no draft."""


def arrays(offers: Offers, longest: int = 4) -> tuple[Float64Array, Int32Array]:
    """The offers as arrays with one unused row, as in the chain."""
    num_rows = len(offers[0]) + 1
    survival = np.full((len(offers), num_rows, longest), np.nan)
    lengths = np.full((len(offers), num_rows), 9, np.int32)
    for source, row in itertools.product(range(len(offers)), range(num_rows - 1)):
        draft = offers[source][row]
        survival[source, row, : len(draft)] = draft
        lengths[source, row] = len(draft)
    return survival, lengths


@kernel
def kernel_of_plan(survival, lengths, n, costs, rank, fixed, found):  # type: ignore[no-untyped-def]
    return plan(survival, lengths, n, n, costs, rank, fixed, found)


@kernel
def kernel_of_probe(survival, lengths, n, found):  # type: ignore[no-untyped-def]
    return probe(survival, lengths, n, found)


class Planned(NamedTuple):
    """A plan of some requests and its figures."""

    source: Int32Array
    lengths: Int32Array
    values: Float64Array
    credits: Float64Array
    num_draft_tokens: int
    rate: float
    gain: float


def planned(
    offers: Offers,
    costs: Costs = CHEAP,
    *,
    rank: Sequence[int] | None = None,
    fixed: Sequence[int] = (),
) -> Planned:
    survival, lengths = arrays(offers)
    count = len(offers)
    is_fixed = np.isin(np.arange(count), fixed)
    order = np.array(range(count) if rank is None else rank, np.int64)
    num_requests = len(offers[0])
    found = Plan.empty(num_requests + 1, count)
    figures = kernel_of_plan(survival, lengths, num_requests, costs, order, is_fixed, found)
    n = num_requests
    return Planned(found.source[:n], found.lengths[:n], found.values[:n], found.credits, *figures)


def brute_force(offers: Offers, costs: Costs) -> float:
    """The highest rate of all choices of a source and a length for each request."""
    num_requests = len(offers[0])
    choices = [
        [(0, 0.0)]
        + [
            (length, sum(source[row][:length]))
            for source in offers
            for length in range(1, len(source[row]) + 1)
        ]
        for row in range(num_requests)
    ]
    best = num_requests / costs.plain
    for chosen in itertools.product(*choices):
        num_tokens = sum(length for length, _ in chosen)
        if num_tokens:
            expected = num_requests + sum(expected for _, expected in chosen)
            best = max(best, expected / (costs.base + costs.slope * num_tokens))
    return best


def falling(rng: random.Random, length: int) -> list[float]:
    return list(itertools.accumulate((rng.uniform(0.05, 0.98) for _ in range(length)), mul))


def random_case(seed: int) -> tuple[Offers, Costs]:
    rng = random.Random(seed)
    num_sources, num_requests = rng.randint(1, 3), rng.randint(1, 3)
    offers = [
        [falling(rng, rng.randint(0, 4)) for _ in range(num_requests)] for _ in range(num_sources)
    ]
    plain = rng.uniform(0.005, 0.05)
    return offers, Costs(plain, plain * rng.uniform(1, 1.3), plain * rng.uniform(0.001, 0.5))


@pytest.mark.parametrize("seed", range(200))
def test_the_plan_has_the_highest_rate_of_all_choices(seed: int) -> None:
    offers, costs = random_case(seed)
    plain_rate, found = len(offers[0]) / costs.plain, planned(offers, costs)
    best = brute_force(offers, costs)
    if best < (1 + MIN_GAIN) * plain_rate:
        assert not found.lengths.any()
        best = plain_rate
    assert found.rate == pytest.approx(best)
    assert found.gain == pytest.approx(best / plain_rate - 1)
    assert found.num_draft_tokens == found.lengths.sum()


@pytest.mark.parametrize("seed", range(20))
def test_a_plans_figures_agree_with_its_drafts(seed: int) -> None:
    offers, costs = random_case(seed)
    found = planned(offers, costs)
    expected = 0.0
    for row, (source, length) in enumerate(zip(found.source, found.lengths, strict=True)):
        assert (source < 0) == (length == 0)
        worth = sum(each - found.rate * costs.slope for each in offers[source][row][:length])
        assert found.values[row] == pytest.approx(worth, abs=1e-6)
        expected += sum(offers[source][row][:length])
    overhead = costs.base - costs.plain if found.num_draft_tokens else 0.0
    seconds = costs.plain + overhead + found.num_draft_tokens * costs.slope
    assert found.rate == pytest.approx((len(found.lengths) + expected) / seconds)


def test_the_first_in_rank_of_equal_drafts_is_chosen_and_credited() -> None:
    same = [[[0.5, 0.3]], [[0.5, 0.3]]]
    for first, second in ((0, 1), (1, 0)):
        found = planned(same, rank=(first, second))
        assert found.source.tolist() == [first]
        assert found.credits[first] > 0
        assert found.credits[second] == 0


def test_a_source_is_credited_with_its_gain_over_those_before_it() -> None:
    alone, better = [[0.5], [0.5]], [[0.9], []]
    found = planned([alone, better])
    assert found.source.tolist() == [1, 0]
    price = found.rate * CHEAP.slope
    assert found.credits == pytest.approx([2 * (0.5 - price), 0.4])


def test_credits_share_the_fixed_cost_of_sending_drafts() -> None:
    found = planned([[[0.9, 0.8, 0.7]]], costs := Costs(0.01, 0.012, 0.0001))
    assert found.credits.sum() == pytest.approx(
        found.values.sum() - found.rate * (costs.base - costs.plain)
    )


def test_a_draft_with_a_gain_below_noise_is_not_sent_nor_credited() -> None:
    found = planned([[[0.03]]])
    assert (found.num_draft_tokens, found.gain, found.credits.tolist()) == (0, 0.0, [0.0])
    assert found.rate == pytest.approx(1 / CHEAP.plain)


def test_drafts_of_a_fixed_source_are_sent_whole_at_any_cost() -> None:
    found = planned([[[0.1, 0.01], [0.9, 0.8]]], DEAR, fixed=(0,))
    assert found.lengths.tolist() == [2, 2]
    assert found.gain < 0


@pytest.mark.parametrize("rank", [(0, 1), (1, 0)])
def test_a_fixed_draft_is_sent_if_the_other_ones_gain_is_below_noise(
    rank: Sequence[int],
) -> None:
    # The other draft is slightly better, but both gains are below noise.
    costs = Costs(0.01, 0.0102, 0.0003)
    found = planned([[[0.05, 0.05]], [[0.06]]], costs, rank=rank, fixed=(0,))
    assert (found.source.tolist(), found.lengths.tolist()) == ([0], [2])


def test_a_better_draft_replaces_a_fixed_one() -> None:
    found = planned([[[0.1, 0.01]], [[0.9, 0.8]]], fixed=(0,))
    assert (found.source.tolist(), found.lengths.tolist()) == ([1], [2])


def test_a_plan_without_requests_or_drafts_is_empty() -> None:
    assert planned([[]]).rate == 0
    nothing = planned([[[], []]])
    assert (nothing.source.tolist(), nothing.lengths.tolist()) == ([-1, -1], [0, 0])


def test_a_probe_sends_the_first_tokens_of_likely_drafts() -> None:
    survival, lengths = arrays([[[0.9, 0.8, 0.7, 0.6], [0.4], []], [[0.95], [0.3], [0.6]]])
    found = Plan.empty(4, 2)
    num_tokens, expected = kernel_of_probe(survival, lengths, 3, found)
    assert found.source[:3].tolist() == [0, -1, 1]
    assert found.lengths[:3].tolist() == [PROBE_TOKENS, 0, 1]
    assert num_tokens == PROBE_TOKENS + 1
    assert expected == pytest.approx(0.9 + 0.8 + 0.7 + 0.6)


RATE = 100.0


def called(
    unseen: Sequence[Sequence[float]],
    *,
    values: Sequence[float] | None = None,
    call: tuple[float, float, float] = (0.001, 0.0, 0.0),
    waits_s: Sequence[float] | None = None,
    saved_s: Float64Array | None = None,
    costs: Costs = CHEAP,
    is_drafting: bool = True,
    limit: int = 4,
) -> tuple[list[int], float]:
    count = len(unseen)
    zeros = [0.0] * count
    asked = np.zeros(count, np.int32)
    surplus = plan_call(
        np.array([*unseen, [np.nan] * 4]),
        np.full(count, limit, np.int32),
        np.array(values or zeros),
        costs,
        call,
        RATE,
        is_drafting,
        np.array(waits_s or zeros),
        np.zeros(count) if saved_s is None else saved_s,
        asked,
    )
    return asked.tolist(), surplus


GOOD = [0.9, 0.8, 0.7, 0.6]


def test_a_call_asks_for_the_requests_that_gain() -> None:
    asked, surplus = called([GOOD, GOOD, [0.0] * 4], values=(0.0, 2.99, 0.0))
    assert asked == [4, 0, 0]
    assert surplus == pytest.approx(3.0 - 4 * RATE * CHEAP.slope - 0.1)


def test_a_call_that_costs_more_than_it_gains_is_not_made() -> None:
    assert called([GOOD], call=(0.04, 0.0, 0.0)) == ([0], 0.0)
    assert called([GOOD] * 2, call=(0.04, 0.0, 0.0))[0] == [4, 4]


def test_a_call_for_the_only_drafts_also_pays_their_fixed_cost() -> None:
    dear = Costs(0.01, 0.05, 0.0001)
    assert called([GOOD], costs=dear, is_drafting=True)[0] == [4]
    assert called([GOOD], costs=dear, is_drafting=False)[0] == [0]


@pytest.mark.parametrize(("token_s", "length"), [(0.0, 4), (0.004, 2), (0.0085, 1)])
def test_costlier_tokens_lead_to_shorter_drafts(token_s: float, length: int) -> None:
    unseen = [0.9, 0.8, 0.35, 0.34]
    assert called([unseen], call=(0.0, 0.0, token_s))[0] == [length]
    assert called([unseen], call=(0.0, 0.0, token_s), limit=1)[0] == [1]


def test_a_text_is_read_once_its_drafts_would_have_saved_the_cost() -> None:
    saved_s, waits_s, num_steps = np.zeros(1), (0.1,), 0
    gain_s = (sum(GOOD) - 4 * RATE * CHEAP.slope) / RATE
    while True:
        num_steps += 1
        asked, surplus = called([GOOD], waits_s=waits_s, saved_s=saved_s)
        assert surplus == 0.0  # the step that reads the text gets no draft
        if asked != [0]:
            break
    assert num_steps == int(0.1 / gain_s) + 1
    assert saved_s[0] == pytest.approx(num_steps * gain_s)


def test_texts_to_be_read_do_not_pay_for_calls_of_others() -> None:
    asked, surplus = called(
        [GOOD, [0.6, 0, 0, 0]],
        call=(0.01, 0.0, 0.0),
        waits_s=(0.001, 0.0),
        saved_s=np.array([1.0, 0.0]),
    )
    assert (asked, surplus) == ([4, 0], 0.0)


@pytest.mark.parametrize("waits", [float("inf"), float("nan")])
def test_a_text_that_is_being_read_or_unreadable_is_skipped(waits: float) -> None:
    saved_s = np.zeros(1)
    assert called([GOOD], waits_s=(waits,), saved_s=saved_s) == ([0], 0.0)
    assert saved_s.tolist() == [0.0]
