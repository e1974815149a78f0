from __future__ import annotations

import numpy as np

from specserve.policy.asking import EXPLORED_SHARE, MOST_PAUSE, Exploration, LocalAsk

SLOTS = np.arange(1)
ONE = np.ones(1, np.int32)


def turns(ask: LocalAsk, steps: range, call_s: float, gain_s: float) -> list[int]:
    """The steps in which the source is asked."""
    return [step for step in steps if ask.is_due(step, SLOTS) and observed(ask, call_s, gain_s)]


def observed(ask: LocalAsk, call_s: float, gain_s: float) -> bool:
    ask.observe(ONE, ONE, call_s, gain_s)
    return True


def test_a_source_that_saves_more_than_it_takes_is_asked_in_each_step() -> None:
    ask = LocalAsk()
    assert len(turns(ask, range(200), call_s=1e-4, gain_s=2e-4)) == 200
    assert not ask.is_slow
    assert ask.num_idle_steps(200, SLOTS) == 0


def test_a_source_that_takes_more_than_it_saves_is_asked_in_each_eighth_step() -> None:
    ask = LocalAsk()
    turns(ask, range(400), call_s=1e-4, gain_s=0.0)
    assert ask.is_slow
    assert turns(ask, range(400, 480), call_s=1e-4, gain_s=0.0) == list(range(400, 480, MOST_PAUSE))
    assert ask.num_idle_steps(480, SLOTS) == MOST_PAUSE - 1


def test_one_that_begins_to_pay_is_asked_in_each_step_at_once() -> None:
    ask = LocalAsk()
    turns(ask, range(400), call_s=1e-4, gain_s=0.0)
    assert turns(ask, range(400, 420), call_s=1e-4, gain_s=1e-2) == list(range(400, 420))


def test_a_call_that_stalls_does_not_make_it_slow() -> None:
    ask = LocalAsk()
    turns(ask, range(100), call_s=1e-4, gain_s=1.5e-4)
    observed(ask, 1.0, 1.5e-4)
    assert not ask.is_slow


def test_what_is_done_to_learn_costs_a_hundredth_of_the_time() -> None:
    account, spent_s = Exploration(), 0.0
    for _ in range(10_000):
        account.earn(0.01)
        spent_s += 0.003 * account.spend(0.003)
    assert 0.9 * EXPLORED_SHARE * 100 < spent_s < 1.1 * EXPLORED_SHARE * 100


def test_a_rest_is_saved_up_for_no_more_than_four_steps() -> None:
    account = Exploration()
    for _ in range(10_000):
        account.earn(0.01)
    assert not account.spend(0.0401)
    assert account.spend(0.0399)
    assert not account.spend(0.0399)
