from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specserve.core.metrics import SpeculationMetrics
from specserve.core.types import Drafts, Float64Array, Int32Array
from specserve.policy.asking import (
    MAX_ASK_INTERVAL,
    MAX_DECISION_INTERVAL,
    MAX_PROBE_INTERVAL,
    AskPolicy,
    LocalAskPolicy,
    RemoteAskPolicy,
)
from specserve.policy.planner import Costs
from specserve.policy.step import EXPLORED_SHARE, earn, spend
from specserve.sources.base import Member
from specserve.sources.guard import GuardedSource
from tests.draft_batches import draft_batch
from tests.policy.traffic import Clock, FakeLocal, FakeRemote

STEP_S = 0.01
COSTS = Costs(STEP_S, STEP_S, 1e-4)
ONE = np.ones(1, np.int32)
NONE = np.zeros(1, np.int32)
SLOTS = np.array([0])


def guarded(kind: str, source: FakeLocal) -> GuardedSource:
    member = Member(kind, source, (kind,), 8)
    return GuardedSource(member, SpeculationMetrics(), Clock(), Drafts.empty(4, 8))


def local() -> LocalAskPolicy:
    return LocalAskPolicy(0, guarded("ngram", FakeLocal(lambda slot: (), Clock())))


def full() -> Float64Array:
    return np.full(1, 1e9)


def empty() -> Float64Array:
    return np.zeros(1)


def new() -> Float64Array:
    return np.full(1, np.inf)


def test_an_account_allows_one_percent_of_the_time_after_a_first_credit() -> None:
    account, spent_s = new(), 0.0
    for _ in range(10_000):
        earn(account, STEP_S, 1)
        while spend(account, STEP_S / 2, STEP_S):
            spent_s += STEP_S / 2
    assert spent_s == pytest.approx(10_000 * STEP_S * EXPLORED_SHARE, abs=5 * STEP_S)


def test_an_account_earns_in_idle_steps_and_holds_at_most_four_steps() -> None:
    account = new()
    earn(account, STEP_S, 100_000)
    assert spend(account, 4 * STEP_S, STEP_S)
    assert not spend(account, STEP_S, STEP_S)
    earn(account, STEP_S, 100)
    assert spend(account, 0.99 * STEP_S, STEP_S)


def test_a_call_that_costs_more_than_an_account_holds_is_made_on_credit() -> None:
    account, tries = new(), 0
    for _ in range(10_000):
        earn(account, STEP_S, 1)
        tries += bool(spend(account, 20 * STEP_S, STEP_S))
    assert tries == pytest.approx(10_000 * EXPLORED_SHARE / 20, abs=1)


def test_a_local_source_that_pays_is_asked_in_each_step() -> None:
    ask = local()
    for _ in range(100):
        ask.observe(1e-4, 2e-4)
        assert not ask.is_slow
        assert not ask.num_idle_steps(3, SLOTS)
    assert ask.surplus_s == pytest.approx(1e-4)


def test_a_local_source_that_does_not_pay_is_asked_with_back_off() -> None:
    ask, idle = local(), []
    for _ in range(12):
        ask.observe(1e-4, 0.0)
        idle.append(ask.num_idle_steps(0, SLOTS))
    assert idle == [0] * 7 + [1, 3, 7, 7, 7]
    assert ask.is_slow
    due = [step for step in range(24) if ask.is_due(step, SLOTS)]
    assert due == [0, MAX_ASK_INTERVAL, 2 * MAX_ASK_INTERVAL]
    assert [ask.num_idle_steps(step, SLOTS) for step in (0, 1, 7)] == [7, 6, 0]


def test_a_local_source_that_pays_again_leaves_back_off_at_once() -> None:
    ask = local()
    for _ in range(100):
        ask.observe(1e-4, 0.0)
    ask.observe(1e-4, STEP_S)
    assert not ask.is_slow


def test_one_stalled_call_does_not_start_back_off() -> None:
    ask = local()
    for _ in range(100):
        ask.observe(1e-4, 2e-4)
    ask.observe(10.0, 2e-4)
    assert not ask.is_slow


def test_a_fixed_source_is_asked_in_every_step() -> None:
    ask = AskPolicy(0, guarded("ngram", FakeLocal(lambda slot: (), Clock())))
    assert ask.is_due(1, SLOTS)
    assert not ask.is_slow
    assert ask.num_idle_steps(1, SLOTS) == 0


@pytest.fixture
def source() -> FakeRemote:
    return FakeRemote(lambda slot: (), Clock())


@pytest.fixture
def ask(source: FakeRemote) -> RemoteAskPolicy:
    return RemoteAskPolicy(0, guarded("mtp", source), 4)


def context(
    step: int,
    *,
    unseen: float = 0.0,
    values: Sequence[float] = (0.0,),
    limits: Sequence[int] = (4,),
) -> dict[str, Any]:
    """Arguments for a step: each draft token of the source survives with probability ``unseen``."""
    size = len(values)
    batch = draft_batch({slot: [1, 2, 3] for slot in range(size)})
    survival = np.full((4, 8), unseen)
    return {
        "step": step,
        "batch": batch,
        "limits": np.array(limits, np.int32),
        "values": np.array(values),
        "rate": size / STEP_S,
        "costs": COSTS,
        "unseen": survival,
        "is_drafting": False,
    }


def probes(
    ask: RemoteAskPolicy, num_steps: int, lengths: Int32Array, account: Float64Array | None = None
) -> list[int]:
    """The steps in which a source without expected gain is probed."""
    found = []
    for step in range(num_steps):
        asked = ask.limits(**context(step), credit_s=full() if account is None else account)
        if asked.any():
            found.append(step)
        ask.observe(asked, lengths, 0.005)
    return found


def test_probes_of_a_source_without_expected_gain_back_off(ask: RemoteAskPolicy) -> None:
    pauses = np.diff(probes(ask, 4000, ONE)).tolist()
    assert pauses[:5] == [1, 2, 4, 8, 16]
    assert max(pauses) == MAX_PROBE_INTERVAL


def test_a_probe_is_repeated_until_it_gets_a_draft(ask: RemoteAskPolicy) -> None:
    assert probes(ask, 6, NONE) == list(range(6))
    ask.observe(ONE, ONE, 0.005)
    assert len(probes(ask, 64, ONE)) < 10


def test_a_probe_lets_the_source_read_one_text_at_a_time(
    ask: RemoteAskPolicy, source: FakeRemote
) -> None:
    def asked(step: int) -> Any:
        asked = ask.limits(**context(step, values=(0.0, 0.0), limits=(4, 4)), credit_s=full())
        ask.observe(asked, np.zeros(2, np.int32), 0.0)
        return asked.tolist()

    source.waits = {0: 0.1, 1: 0.1}
    assert asked(0) == [4, 0]
    source.waits[0] = float("inf")
    assert asked(8) == [0, 0]
    source.waits[0] = 0.0
    assert asked(16) == [4, 0]


def test_probes_are_paid_from_the_account(ask: RemoteAskPolicy) -> None:
    account = new()
    earn(account, STEP_S, 1)
    num_probes = len(probes(ask, 200, NONE, account))
    assert 0 < num_probes < 40
    assert not spend(account, 4 * STEP_S, STEP_S)


def test_a_probe_asks_for_the_readable_text_with_the_lowest_draft_value(
    ask: RemoteAskPolicy, source: FakeRemote
) -> None:
    source.waits = {0: float("nan"), 1: float("inf")}
    asked = ask.limits(
        **context(0, values=(0.0, 0.0, 1.0, 0.5), limits=(4, 4, 4, 3)), credit_s=full()
    )
    assert asked.tolist() == [0, 0, 0, 3]
    assert not ask.limits(**context(0, values=(0.0, 0.0), limits=(0, 0)), credit_s=full()).any()


def test_the_budget_does_not_pay_for_a_probe_whose_text_is_read_first(
    ask: RemoteAskPolicy, source: FakeRemote
) -> None:
    account = np.full(1, 2 * STEP_S)
    source.waits = {0: 0.1}
    assert ask.limits(**context(0), credit_s=account).any()
    assert account == 2 * STEP_S
    source.waits = {}
    assert ask.limits(**context(0), credit_s=account).any()
    assert account < 2 * STEP_S


def test_a_remote_source_is_due_in_each_step_while_it_pays(ask: RemoteAskPolicy) -> None:
    assert [ask.is_due(step, SLOTS) for step in range(9)] == [True] + [False] * 7 + [True]
    assert ask.limits(**context(0, unseen=0.9), credit_s=empty()).tolist() == [4]
    assert ask.is_due(1, SLOTS)
    assert ask.num_idle_steps(1, SLOTS) == 0


def test_decisions_on_a_remote_source_that_does_not_pay_become_rare(
    ask: RemoteAskPolicy, source: FakeRemote
) -> None:
    due = [0]
    while len(due) < 6:
        ask.limits(**context(due[-1]), credit_s=empty())
        due.append(due[-1] + 1 + ask.num_idle_steps(due[-1], SLOTS))
    assert np.diff(due).tolist() == [16, 16, 32, 32, 32]
    assert not ask.is_considered(due[-1] + MAX_DECISION_INTERVAL // 2)
    source.is_watching = True
    assert ask.num_idle_steps(due[-1], SLOTS) == 0


def test_a_probe_without_an_answer_is_soon_repeated(ask: RemoteAskPolicy) -> None:
    ask.limits(**context(0), credit_s=empty())
    assert ask.limits(**context(MAX_DECISION_INTERVAL), credit_s=full()).any()
    ask.observe(ONE, NONE, 0.005)
    assert ask.num_idle_steps(MAX_DECISION_INTERVAL, SLOTS) == MAX_ASK_INTERVAL - 1


def reads(ask: RemoteAskPolicy, step: int) -> bool:
    """Whether a source with a high expected gain is asked in this step."""
    return bool(ask.limits(**context(step, unseen=0.9), credit_s=empty()).any())


def test_a_text_is_read_once_its_own_missed_savings_equal_the_cost(
    ask: RemoteAskPolicy, source: FakeRemote
) -> None:
    source.waits = {0: 0.1}
    steps = [reads(ask, step) for step in range(10)]
    first = steps.index(True)
    assert first > 1
    ask.forget(SLOTS)
    again = [reads(ask, step) for step in range(10)]
    assert again.index(True) == first


def test_a_paying_source_stays_due_while_it_reads_a_text(
    ask: RemoteAskPolicy, source: FakeRemote
) -> None:
    assert ask.limits(**context(0, unseen=0.9), credit_s=empty()).any()
    source.waits = {0: np.inf}
    for step in range(1, 4):
        assert ask.is_due(step, SLOTS)
        assert not ask.limits(**context(step, unseen=0.9), credit_s=empty()).any()
    source.waits = {}
    assert ask.is_due(4, SLOTS)
    assert ask.limits(**context(4, unseen=0.9), credit_s=empty()).any()


def test_decisions_become_no_rarer_while_the_source_reads_a_text(
    ask: RemoteAskPolicy, source: FakeRemote
) -> None:
    source.waits = {0: np.inf}
    for step in (0, 8, 16):
        assert ask.is_due(step, SLOTS)
        ask.limits(**context(step), credit_s=full())
    assert ask.num_idle_steps(16, SLOTS) == MAX_ASK_INTERVAL - 1


def test_a_paying_source_stays_due_after_a_step_in_which_no_draft_fits(
    ask: RemoteAskPolicy,
) -> None:
    assert ask.limits(**context(0, unseen=0.9), credit_s=empty()).any()
    assert not ask.limits(**context(1, unseen=0.9, limits=(0,)), credit_s=empty()).any()
    assert ask.is_due(2, SLOTS)
    for step in range(2, 1 + MAX_ASK_INTERVAL):
        ask.limits(**context(step, unseen=0.9, limits=(0,)), credit_s=empty())
    assert ask.is_slow  # no request wants drafts


def test_a_call_that_only_sends_a_text_is_not_measured(
    ask: RemoteAskPolicy, source: FakeRemote
) -> None:
    good = context(0, unseen=0.5)
    source.waits = {0: 1e-9}
    for _ in range(20):
        assert ask.limits(**good, credit_s=empty()).any()
        ask.observe(ONE * 4, NONE, 0.05)  # hidden states were copied
    source.waits = {}
    assert ask.limits(**good, credit_s=empty()).any()


def test_a_source_is_asked_only_while_its_calls_are_fast(ask: RemoteAskPolicy) -> None:
    good, four = context(0, unseen=0.5), ONE * 4
    assert ask.limits(**good, credit_s=empty()).any()
    for seconds, is_asked in ((0.05, False), (0.001, True)):
        for _ in range(20):
            ask.observe(four, four, seconds)
        assert ask.limits(**good, credit_s=empty()).any() == is_asked


def test_calls_that_reach_no_drafter_do_not_lower_the_cost(ask: RemoteAskPolicy) -> None:
    good = context(0, unseen=0.5)
    ask.limits(**good, credit_s=empty())
    for _ in range(10):
        ask.observe(ONE, ONE, 0.05)
    for _ in range(50):
        ask.observe(ONE, NONE, 1e-5)
    assert not ask.limits(**good, credit_s=empty()).any()


def test_a_probe_asks_for_a_text_that_the_source_follows(
    ask: RemoteAskPolicy, source: FakeRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "are_followed", lambda slots: slots == 1)
    asked = ask.limits(**context(0, values=(0.0, 1.0), limits=(4, 4)), credit_s=full())
    assert asked.tolist() == [0, 4]


def test_a_probe_waits_for_a_followed_text_for_a_limited_time(
    ask: RemoteAskPolicy, source: FakeRemote
) -> None:
    source.may_follow = True
    assert probes(ask, MAX_PROBE_INTERVAL, ONE) == []
    assert source.num_to_follow == MAX_PROBE_INTERVAL
    asked = ask.limits(**context(MAX_PROBE_INTERVAL), credit_s=full())
    assert asked.tolist() == [4]
    ask.observe(asked, ONE, 0.005)
    source.is_watching = True
    assert ask.limits(**context(MAX_PROBE_INTERVAL + 1), credit_s=full()).tolist() == [4]


def test_no_text_is_followed_without_credit_for_a_probe(
    ask: RemoteAskPolicy, source: FakeRemote
) -> None:
    source.may_follow = True
    assert probes(ask, 100, ONE, empty()) == []
    assert source.num_to_follow == 0


def test_a_probe_waits_again_after_the_source_has_paid(
    ask: RemoteAskPolicy, source: FakeRemote
) -> None:
    source.may_follow = True
    assert not ask.limits(**context(0), credit_s=full()).any()
    assert ask.limits(**context(100, unseen=0.9), credit_s=full()).any()
    assert not ask.limits(**context(MAX_PROBE_INTERVAL), credit_s=full()).any()
