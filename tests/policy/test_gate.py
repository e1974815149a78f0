from __future__ import annotations

from dataclasses import replace

import pytest

from specserve.core.types import Draft
from specserve.sources.gate import Gate
from tests.sources.simulation import (
    ALWAYS,
    FLAT,
    MODERATE,
    NEVER,
    OFTEN,
    STEEP,
    Cost,
    FixedLength,
    Workload,
    speedup,
)

COSTS = [
    pytest.param(FLAT, 1, id="flat-1"),
    pytest.param(FLAT, 8, id="flat-8"),
    pytest.param(MODERATE, 1, id="moderate-1"),
    pytest.param(MODERATE, 8, id="moderate-8"),
    pytest.param(STEEP, 8, id="steep-8"),
]
STREAMS = [
    pytest.param((ALWAYS,), id="always"),
    pytest.param((OFTEN,), id="often"),
    pytest.param((NEVER,), id="never"),
    pytest.param((ALWAYS, NEVER), id="mixed"),
]


@pytest.mark.parametrize(("cost", "concurrency"), COSTS)
@pytest.mark.parametrize("chances", STREAMS)
def test_speculation_hardly_ever_loses_and_comes_near_the_best_fixed_length(
    chances: tuple[tuple[float, float], ...], cost: Cost, concurrency: int
) -> None:
    workload = Workload(chances, cost, concurrency)
    best = max(speedup(workload, FixedLength(length)) for length in (0, 1, 2, 4, 8))
    assert speedup(workload, Gate()) >= max(0.97, 0.93 * best)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_cold_start_with_useless_drafts_costs_little(concurrency: int) -> None:
    workload = Workload((NEVER,), STEEP, concurrency, num_steps=150)
    assert speedup(workload, FixedLength(8)) < 0.7
    assert speedup(workload, Gate()) >= 0.97


def test_among_requests_that_never_accept_those_that_do_are_still_served() -> None:
    mixed = Workload((ALWAYS, NEVER), MODERATE, 8, num_steps=1000)
    assert speedup(mixed, Gate()) > 1.1 * max(
        speedup(mixed, FixedLength(length)) for length in (0, 1, 2, 4, 8)
    )


def test_a_gate_that_was_off_finds_out_that_drafts_pay_again() -> None:
    gate = Gate()
    before = Workload((NEVER,), MODERATE, 4, num_steps=800)
    after = replace(before, chances=(ALWAYS,))
    speedup(before, gate)
    assert speedup(after, gate) > 0.85 * speedup(after, Gate())


def test_a_gate_finds_out_that_drafts_became_dear() -> None:
    gate = Gate()
    cheap = Workload((OFTEN,), FLAT, 8, num_steps=400)
    speedup(cheap, gate)
    assert speedup(replace(cheap, cost=STEEP), gate) >= 0.95


def test_a_gate_that_knows_single_requests_finds_out_that_drafts_lose_with_many() -> None:
    gate = Gate()
    speedup(Workload((OFTEN,), STEEP, 1, num_steps=400), gate)
    assert speedup(Workload((OFTEN,), STEEP, 32, num_steps=60), gate) >= 0.95


def test_first_steps_that_were_slow_do_not_keep_it_drafting_at_a_loss() -> None:
    cost = Cost(0.2, 0.1, 0.4, 0.1)
    work = Workload(((0.85, 0.85),), cost, 8, num_steps=1500, draft_len=1, hit_rate=1.0)
    assert speedup(work, FixedLength(1)) < 0.9
    gate = Gate()
    for _ in range(3):
        gate.observe_step(8, 0, 2.5 * cost.seconds(8, 0))
    assert speedup(work, gate) >= 0.96


def test_a_step_that_is_to_tell_the_cost_without_drafts_has_none() -> None:
    gate, names = Gate(), ["a", "b"]
    offers = [Draft((1, 2, 3), "ngram", 4)] * 2
    for _ in range(10):
        gate.observe_step(2, 0, 0.01)
    empty = 0
    for _ in range(130):
        drafts = gate.trim(names, offers)
        num_tokens = sum(len(draft.tokens) for draft in drafts)
        empty += not num_tokens
        gate.observe_step(2, num_tokens, 0.01 + 0.0005 * num_tokens)
        for name, draft in zip(names, offers, strict=True):
            gate.acceptance.observe(name, draft, draft.tokens)
    assert empty >= 5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_gate_follows_texts_that_drafts_pay_for_and_others_that_they_do_not(seed: int) -> None:
    # As a small model on a CPU: 32 texts of 430 tokens or of 80, each token read by each query.
    dear = Workload(((0.6, 0.6),), Cost(1, 0.166, 0.3, 0.13), 32, num_steps=300, seed=seed)
    cheap = Workload((ALWAYS,), Cost(1, 0.096, 0.3, 0.06), 32, num_steps=200, seed=seed)
    gate, fresh = Gate(), Gate()
    fresh.cost.context = 80.0
    best = speedup(cheap, fresh)
    assert best > 1.15
    for _ in range(2):
        gate.cost.context = 430.0
        assert speedup(dear, gate) >= 0.955
        gate.cost.context = 80.0
        assert speedup(cheap, gate) >= 0.95 * best


def test_the_same_calls_get_the_same_answers() -> None:
    workload = Workload((ALWAYS, OFTEN, NEVER), MODERATE, 4, num_steps=300)
    assert speedup(workload, Gate()) == speedup(workload, Gate())


def test_without_measured_steps_drafts_are_let_through_at_an_assumed_cost() -> None:
    gate = Gate()
    sent = []
    for _ in range(100):
        [draft] = gate.trim(["a"], [Draft((1, 2, 3, 4), "ngram", 4)])
        sent.append(len(draft.tokens))
        gate.acceptance.observe("a", draft, draft.tokens)
    assert sent[-50:].count(4) >= 45  # a few steps are spent on finding out what plain ones cost


def test_a_trimmed_draft_is_a_prefix() -> None:
    gate = Gate()
    for _ in range(40):
        gate.observe_step(2, 0, 0.01)
        offers = [Draft(tuple(range(10, 18)), "ngram", 3), Draft((), "ngram")]
        cut, empty = gate.trim(["a", "b"], offers)
        assert cut.tokens == offers[0].tokens[: len(cut.tokens)]
        assert empty.tokens == ()


def test_a_batch_without_offers_stays_as_it_is() -> None:
    nothing = [Draft((), "ngram"), Draft((), "ngram")]
    assert Gate().trim(["a", "b"], nothing) == nothing
    assert Gate().trim([], []) == []
