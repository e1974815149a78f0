from __future__ import annotations

import random

import numpy as np
import pytest

from specserve.policy.cost import (
    CALIBRATION_STEPS,
    CallCost,
    StepCost,
    cost_deviation,
    costs_of,
    is_calibrated,
)
from tests.policy.simulation import STEEP, Cost


def at(learned: StepCost, num_requests: int) -> tuple[float, float, float]:
    plain, base, slope = costs_of(learned.lines, num_requests)
    return plain, base, slope


def taught(cost: Cost, noise: float = 0.0, stalls: float = 0.0, steps: int = 400) -> StepCost:
    """The costs learned from steps of 1 to 12 requests; every second step has drafts."""
    rng, learned = random.Random(0), StepCost()
    for step in range(steps):
        num_requests = rng.randint(1, 12)
        num_draft_tokens = rng.randint(1, 8 * num_requests) if step % 2 else 0
        seconds = cost.seconds(num_requests, num_draft_tokens) * rng.gauss(1, noise)
        stall = 20 if rng.random() < stalls else 1
        learned.observe(num_requests, num_draft_tokens, seconds * stall)
    return learned


def measured(times: int, num_requests: int = 4, num_draft_tokens: int = 0) -> StepCost:
    learned = StepCost()
    for _ in range(times):
        learned.observe(num_requests, num_draft_tokens, 0.02)
    return learned


@pytest.mark.parametrize(("noise", "stalls"), [(0.0, 0.0), (0.05, 0.02)])
@pytest.mark.parametrize("num_requests", [1, 4, 12])
def test_the_cost_of_a_step_and_of_its_drafts_is_learned(
    num_requests: int, noise: float, stalls: float
) -> None:
    plain, base, slope = at(taught(STEEP, noise, stalls), num_requests)
    longest = 8 * num_requests
    assert plain == pytest.approx(STEEP.seconds(num_requests, 0), rel=0.12)
    assert base + longest * slope == pytest.approx(STEEP.seconds(num_requests, longest), rel=0.12)


@pytest.mark.parametrize("num_slow", [1, 3])
def test_slow_first_steps_do_not_raise_the_costs(num_slow: int) -> None:
    learned = StepCost()
    for seconds in [30.0] * num_slow + [0.01] * 10:
        learned.observe(1, 0, seconds)
    plain, base, slope = at(learned, 1)
    assert plain == pytest.approx(0.01, rel=0.05)
    assert base < 0.015
    assert slope < 0.001
    assert cost_deviation(learned.lines, 1, 3) < 0.01


def test_changed_costs_are_learned_within_ten_steps() -> None:
    learned = measured(100)
    for seconds in (0.06, 0.015):
        for _ in range(10):
            learned.observe(4, 0, seconds)
        assert at(learned, 4)[0] == pytest.approx(seconds, rel=0.1)


def test_one_outlier_changes_little() -> None:
    learned = measured(100)
    learned.observe(4, 0, 2.0)
    assert at(learned, 4)[0] == pytest.approx(0.02, rel=0.05)


def test_slower_plain_steps_raise_the_cost_of_unmeasured_drafts() -> None:
    learned, rng = StepCost(), random.Random(0)
    for step in range(300):
        num_draft_tokens = rng.randint(1, 20) if step % 2 else 0
        learned.observe(4, num_draft_tokens, 0.02 + 0.002 * num_draft_tokens)
    before = at(learned, 4)[2]
    for step in range(300):
        learned.observe(4, 0, 0.02 * (1 + step / 300))
    assert at(learned, 4)[2] > 1.3 * before


def test_doubt_about_drafts_grows_while_none_are_measured_and_falls_when_one_is() -> None:
    learned = taught(STEEP)
    fresh = cost_deviation(learned.lines, 4, 4)
    for _ in range(300):
        learned.observe(4, 0, STEEP.seconds(4, 0))
    stale = cost_deviation(learned.lines, 4, 4)
    learned.observe(4, 4, STEEP.seconds(4, 4))
    assert stale > 1.5 * fresh
    assert cost_deviation(learned.lines, 4, 4) < 0.6 * stale


def test_unmeasured_drafts_cost_a_small_share_of_a_plain_step() -> None:
    for learned in (StepCost(), measured(10)):
        plain, base, slope = at(learned, 4)
        assert base == pytest.approx(plain)
        assert 0 < slope < 0.05 * plain


@pytest.mark.parametrize("num_requests", [0, 4])
@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_invalid_measurements_are_ignored(num_requests: int, seconds: float) -> None:
    learned = StepCost()
    for _ in range(CALIBRATION_STEPS):
        learned.observe(num_requests, 0, seconds)
    assert not is_calibrated(learned.lines, 4)
    assert at(learned, 0) == at(learned, 4) == at(StepCost(), 1)


def test_a_measured_batch_size_is_remembered_while_others_run() -> None:
    learned = StepCost()
    seconds = {1: 0.012, 8: 0.02, 32: 0.05}
    for num_requests in (1, 8, 32, 1):
        for _ in range(300):
            learned.observe(num_requests, 0, seconds[num_requests])
    for num_requests, expected in seconds.items():
        assert at(learned, num_requests)[0] == pytest.approx(expected)


@pytest.mark.parametrize(("size", "plain_s", "slope"), [(16, 0.03, 0.001), (1, 0.003, 0.0003)])
def test_a_draft_token_costs_no_more_in_an_unmeasured_batch_size(
    size: int, plain_s: float, slope: float
) -> None:
    learned, rng = StepCost(), random.Random(0)
    for step in range(300):
        num_draft_tokens = rng.randint(1, 8) if step % 2 else 0
        learned.observe(4, num_draft_tokens, 0.01 + 0.001 * num_draft_tokens)
    assert not is_calibrated(learned.lines, size)
    for _ in range(CALIBRATION_STEPS):
        learned.observe(size, 0, plain_s)
    assert is_calibrated(learned.lines, size)
    assert at(learned, size)[2] == pytest.approx(slope, rel=0.2)


@pytest.mark.parametrize(("measured_size", "asked"), [(1, 10**6), (10**6, 1), (32, 1), (32, 500)])
def test_a_batch_size_uses_the_costs_of_the_nearest_measured_one(
    measured_size: int, asked: int
) -> None:
    learned = StepCost()
    learned.observe(measured_size, 0, 0.02)
    assert at(learned, asked) == at(learned, measured_size)


def test_a_drafters_first_call_is_predicted_as_measured() -> None:
    cost = CallCost()
    cost.observe(2, 4, 0.03, 0.01)
    call, request, token = cost.coefficients(0.01)
    assert call + 2 * request + 4 * token == pytest.approx(0.03, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_costs_are_positive_and_finite_after_any_measurements(seed: int) -> None:
    rng, learned = random.Random(seed), StepCost()
    for _ in range(200):
        seconds = rng.choice([1e-6, 1e-3, 0.01, 0.01, 1.0, 1e4]) * (1 + rng.random())
        learned.observe(rng.choice([1, 1, 2, 8, 500]), rng.choice([0, 1, 2, 10, 5000]), seconds)
        for num_requests in (1, 2, 8, 500):
            plain, base, slope = at(learned, num_requests)
            assert 0 < plain <= base < np.inf
            assert 0 < slope < np.inf
            assert 0 <= cost_deviation(learned.lines, num_requests, 100) < np.inf


def test_the_costs_of_a_call_are_learned_and_still_change_after_many_calls() -> None:
    rng, cost = random.Random(0), CallCost()
    for num_calls, factor in ((5000, 1), (200, 3)):
        for _ in range(num_calls):
            rows, longest = rng.choice([1, 64]), rng.choice([1, 128])
            cost.observe(rows, longest, factor * (1e-3 + 1e-4 * rows + 1e-5 * longest), 0.01)
        expected = factor * np.array([1e-3, 1e-4, 1e-5])
        assert np.allclose(cost.coefficients(0.01), expected, rtol=0.2)


@pytest.mark.parametrize("num_slow", [0, 1, 10])
def test_the_time_of_calls_of_one_size_is_predicted(
    num_slow: int,
) -> None:
    cost = CallCost()
    for seconds in [0.05] * num_slow + [0.001] * 20:
        cost.observe(1, 4, seconds, 0.01)
    assert np.dot(cost.coefficients(0.01), (1, 1, 4)) == pytest.approx(0.001, rel=0.05)


def test_a_long_first_call_is_forgotten_with_the_second_one() -> None:
    cost = CallCost()
    for seconds in (0.014, 0.004):
        cost.observe(1, 2, seconds, 0.007)
    assert np.dot(cost.coefficients(0.007), (1, 1, 2)) == pytest.approx(0.004, rel=0.05)


@pytest.mark.parametrize("num_stalls", [3, 240])
def test_costlier_drafts_are_noticed_after_many_stalls(num_stalls: int) -> None:
    rng, learned = random.Random(0), StepCost()

    def run(steps: int, times: float = 1.0, slope: float = 1e-6) -> None:
        for _ in range(steps):
            num_draft_tokens = rng.randint(0, 1) * rng.randint(1, 8)
            seconds = times * (0.010 + slope * num_draft_tokens) * rng.gauss(1, 0.03)
            learned.observe(1, num_draft_tokens, seconds)

    run(100)
    for _ in range(num_stalls):
        run(12, times=5.0)
        run(40)
    run(2000, slope=0.002)
    plain, base, slope = at(learned, 1)
    assert plain == pytest.approx(0.010, rel=0.1)
    assert slope == pytest.approx(0.002, rel=0.1)
    assert base - plain < 0.001
