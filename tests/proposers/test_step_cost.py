from __future__ import annotations

import random

import pytest

from specserve.proposers.step_cost import StepCost
from tests.proposers.simulation import STEEP, Cost


def taught(cost: Cost, noise: float = 0.0, stalls: float = 0.0, steps: int = 400) -> StepCost:
    rng = random.Random(0)
    learned = StepCost()
    for step in range(steps):
        num_requests = rng.randint(1, 12)
        num_draft_tokens = rng.randint(1, 8 * num_requests) if step % 2 else 0
        seconds = cost.seconds(num_requests, num_draft_tokens) * rng.gauss(1, noise)
        learned.observe(
            num_requests, num_draft_tokens, seconds * (20 if rng.random() < stalls else 1)
        )
    return learned


@pytest.mark.parametrize(("noise", "stalls"), [(0.0, 0.0), (0.05, 0.02)])
@pytest.mark.parametrize("num_requests", [1, 4, 12])
def test_the_cost_of_a_step_and_of_its_drafts_is_learned(
    num_requests: int, noise: float, stalls: float
) -> None:
    plain, spec, per_token = taught(STEEP, noise, stalls).at(num_requests)
    tolerance = 0.02 if not noise else 0.12
    assert plain == pytest.approx(STEEP.seconds(num_requests, 0), rel=tolerance)
    longest = 8 * num_requests
    assert spec + longest * per_token == pytest.approx(
        STEEP.seconds(num_requests, longest), rel=tolerance
    )


def test_a_first_step_that_compiles_does_not_count() -> None:
    learned = StepCost()
    for seconds in (30.0, 0.01, 0.01, 0.01):
        learned.observe(1, 0, seconds)
    assert learned.at(1)[0] == pytest.approx(0.01, rel=0.01)


def test_costs_that_change_are_followed() -> None:
    learned = taught(STEEP)
    dearer = Cost(2 * STEEP.base, STEEP.per_request, STEEP.any_draft, STEEP.per_token)
    for _ in range(300):
        learned.observe(8, 0, dearer.seconds(8, 0))
    assert learned.at(8)[0] == pytest.approx(dearer.seconds(8, 0), rel=0.02)


def test_unmeasured_drafts_cost_a_little() -> None:
    learned = StepCost()
    for _ in range(10):
        learned.observe(4, 0, 0.02)
    plain, spec, per_token = learned.at(4)
    assert spec == pytest.approx(plain)
    assert 0 < per_token < 0.05 * plain


def test_nothing_becomes_cheaper_by_more_work() -> None:
    learned = StepCost()
    rng = random.Random(0)
    for step in range(200):
        learned.observe(8, 16 * (step % 2), 0.02 * rng.uniform(0.5, 1.5) / (1 + step % 2))
    plain, spec, per_token = learned.at(8)
    assert plain <= spec
    assert per_token >= 0


def test_a_time_that_is_none_is_ignored() -> None:
    learned = StepCost()
    for seconds in (0.0, -1.0):
        learned.observe(4, 0, seconds)
    assert not learned.is_calibrated
