from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.policy.simulation import (
    ALWAYS,
    FLAT,
    MODERATE,
    NEVER,
    OFTEN,
    STEEP,
    Cost,
    FixedLength,
    Policy,
    Workload,
    speedup,
    stall_once,
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
def test_the_policy_loses_little_and_is_near_the_best_fixed_length(
    chances: tuple[tuple[float, float], ...], cost: Cost, concurrency: int
) -> None:
    workload = Workload(chances, cost, concurrency)
    best = max(speedup(workload, FixedLength(length)) for length in (0, 1, 2, 4, 8))
    assert speedup(workload, Policy()) >= max(0.97, 0.93 * best)


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_a_cold_start_with_useless_drafts_costs_little(concurrency: int) -> None:
    workload = Workload((NEVER,), STEEP, concurrency, num_steps=150)
    assert speedup(workload, FixedLength(8)) < 0.7
    assert speedup(workload, Policy()) >= 0.97


def test_accepting_requests_get_drafts_beside_ones_that_never_accept() -> None:
    mixed = Workload((ALWAYS, NEVER), MODERATE, 8, num_steps=1000)
    assert speedup(mixed, Policy()) > 1.1 * max(
        speedup(mixed, FixedLength(length)) for length in (0, 1, 2, 4, 8)
    )


def test_the_policy_notices_that_drafts_pay_again() -> None:
    policy = Policy()
    before = Workload((NEVER,), MODERATE, 4, num_steps=800)
    after = replace(before, chances=(ALWAYS,))
    speedup(before, policy)
    assert speedup(after, policy) > 0.85 * speedup(after, Policy())


def test_the_policy_notices_that_drafts_became_costly() -> None:
    policy = Policy()
    cheap = Workload((OFTEN,), FLAT, 8, num_steps=400)
    speedup(cheap, policy)
    assert speedup(replace(cheap, cost=STEEP), policy) >= 0.95


def test_a_policy_that_ran_one_request_notices_losses_with_many() -> None:
    policy = Policy()
    speedup(Workload((OFTEN,), STEEP, 1, num_steps=400), policy)
    assert speedup(Workload((OFTEN,), STEEP, 32, num_steps=60), policy) >= 0.95


@pytest.mark.parametrize("stall", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("seed", range(4))
def test_many_requests_get_drafts_after_one_ran_and_a_step_stalled(seed: int, stall: float) -> None:
    cost = Cost(0.1, 0.022, 0.35, 0.005)  # a small model on a CPU
    many = Workload((ALWAYS,), cost, 24, draft_len=16, hit_rate=0.9, seed=seed)
    policy = Policy(draft_len=16)
    speedup(replace(many, concurrency=1, num_steps=100), policy)
    policy.chain.close(np.arange(1))
    stall_once(policy.chain, stall)
    assert speedup(many, policy) >= 0.85 * speedup(many, FixedLength(8, 16))


def test_slow_first_steps_do_not_cause_lasting_losses() -> None:
    cost = Cost(0.2, 0.1, 0.4, 0.1)
    work = Workload(((0.85, 0.85),), cost, 8, num_steps=1500, draft_len=1, hit_rate=1.0)
    assert speedup(work, FixedLength(1)) < 0.9
    policy = Policy()
    for _ in range(3):
        policy.chain.cost.observe(8, 0, 2.5 * cost.seconds(8, 0))
    assert speedup(work, policy) >= 0.96


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_policy_adapts_when_drafts_stop_and_start_to_pay(seed: int) -> None:
    # The step times of a small model on a CPU with 32 texts of 430 or of 80 tokens.
    dear = Workload(((0.6, 0.6),), Cost(1, 0.166, 0.3, 0.13), 32, num_steps=300, seed=seed)
    cheap = Workload((ALWAYS,), Cost(1, 0.096, 0.3, 0.06), 32, num_steps=200, seed=seed)
    policy = Policy()
    best = speedup(cheap, Policy())
    assert best > 1.15
    for _ in range(2):
        assert speedup(dear, policy) >= 0.955
        assert speedup(cheap, policy) >= 0.95 * best


def test_the_policy_is_deterministic() -> None:
    workload = Workload((ALWAYS, OFTEN, NEVER), MODERATE, 4, num_steps=300)
    assert speedup(workload, Policy()) == speedup(workload, Policy())
