from __future__ import annotations

import random

import pytest

from specserve.sources.step_cost import StepCost
from tests.sources.simulation import STEEP, Cost


def taught(cost: Cost, noise: float = 0.0, stalls: float = 0.0, steps: int = 400) -> StepCost:
    rng = random.Random(0)
    learned = StepCost()
    for num_requests in range(1, 13):
        learned.observe(num_requests, 0, cost.seconds(num_requests, 0))
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
    assert not learned.is_calibrated(4)


def test_a_size_that_was_measured_is_remembered_while_others_run() -> None:
    learned = StepCost()
    seconds = {1: 0.012, 8: 0.02, 32: 0.05}  # not a line
    for num_requests in (1, 8, 32, 1):
        for _ in range(300):
            learned.observe(num_requests, 0, seconds[num_requests])
    for num_requests, expected in seconds.items():
        assert learned.at(num_requests)[0] == pytest.approx(expected)
    assert 0.02 < learned.at(16)[0] < 0.05


def test_steps_of_another_size_have_to_be_measured_first() -> None:
    learned = StepCost()
    for _ in range(10):
        learned.observe(1, 0, 0.01)
    assert learned.is_calibrated(2)
    assert not learned.is_calibrated(8)
    learned.observe(8, 0, 0.02)
    assert learned.is_calibrated(8)
    assert learned.is_calibrated(16)


def test_what_drafts_cost_beside_few_requests_is_expected_beside_many() -> None:
    learned = StepCost()
    for num_requests, seconds in ((1, 0.01), (8, 0.02)):
        for _ in range(10):
            learned.observe(num_requests, 0, seconds)
    for num_tokens in (1, 2, 4, 8) * 50:
        learned.observe(1, num_tokens, 0.01 + 0.001 * num_tokens)
    assert learned.at(8)[2] == pytest.approx(0.001, rel=0.2)


def by_context(num_requests: int, num_draft_tokens: int, context: float) -> float:
    num_queries = num_requests + num_draft_tokens
    return 0.01 + 0.0008 * num_queries + 2e-6 * num_queries * context


def test_what_longer_texts_cost_is_learned() -> None:
    learned, rng = StepCost(), random.Random(0)
    for step in range(400):
        learned.context = 50.0 if step // 40 % 2 else 450.0
        num_draft_tokens = rng.randint(1, 200) if step % 2 else 0
        learned.observe(32, num_draft_tokens, by_context(32, num_draft_tokens, learned.context))
    for context in (50.0, 250.0, 450.0):
        learned.context = context
        plain, spec, per_token = learned.at(32)
        assert plain == pytest.approx(by_context(32, 0, context), rel=0.05)
        assert spec + 100 * per_token == pytest.approx(by_context(32, 100, context), rel=0.05)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("before", "after"), [(430.0, 60.0), (60.0, 430.0)])
def test_noise_makes_nothing_of_texts_of_another_length(
    before: float, after: float, seed: int
) -> None:
    learned, rng = StepCost(), random.Random(seed)
    for step in range(300):
        learned.context = before * rng.uniform(0.95, 1.05)
        num_draft_tokens = rng.randint(30, 60) if step % 10 else 0
        seconds = by_context(32, num_draft_tokens, learned.context) * rng.gauss(1, 0.1)
        learned.observe(32, num_draft_tokens, seconds)
    for _ in range(20):
        learned.context = after
        learned.observe(32, 0, by_context(32, 0, after) * rng.gauss(1, 0.1))
    token_s = by_context(32, 1, after) - by_context(32, 0, after)
    assert 0.6 * token_s < learned.at(32)[2] < 1.5 * token_s


def test_what_longer_texts_cost_at_one_size_is_known_at_the_others() -> None:
    learned = StepCost()
    for num_requests, others in ((2, 8000.0), (16, 400.0)):
        for step in range(40):
            learned.context = 4000.0 if step % 2 else others
            learned.observe(num_requests, 0, by_context(num_requests, 0, learned.context))
    learned.context = 4500.0
    for num_requests in (2, 6, 16):
        expected = by_context(num_requests, 0, 4500.0)
        assert learned.plain(num_requests) == pytest.approx(expected, rel=0.1)


def test_after_long_drafting_a_plain_step_is_not_thought_to_cost_more_than_one_with_drafts() -> (
    None
):
    learned = StepCost()
    for _ in range(60):
        learned.observe(8, 0, 0.03)
    for step in range(60):
        learned.observe(8, 1 + step % 20, 0.02 + 0.0005 * (step % 20))
    plain, spec, _ = learned.at(8)
    assert plain == pytest.approx(spec)
    assert plain == pytest.approx(0.02, rel=0.05)


def test_a_plain_step_teaches_the_more_the_longer_there_was_none() -> None:
    def after(num_drafting: int) -> float:
        learned = taught(STEEP)
        before = learned.plain(8)
        for _ in range(num_drafting):
            learned.observe(8, 8, STEEP.seconds(8, 8))
        learned.observe(8, 0, 1.1 * before)
        return learned.plain(8) / before

    assert 1.001 < after(0) < 1.006
    assert 1.008 < after(60) < 1.03
