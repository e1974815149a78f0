from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specserve.core.recent import MAX_REQUESTS, MAX_STEPS, RecentSteps, Step
from specserve.core.types import RequestControls


class Outcome(NamedTuple):
    """A request's step: its new tokens, after a draft or without one."""

    request_id: str
    new: tuple[int, ...]
    draft: tuple[int, ...]


def outcome(request_id: str, *new: int, draft: tuple[int, ...] = ()) -> Outcome:
    return Outcome(request_id, new, draft)


def note(recent: RecentSteps, outcomes: list[Outcome]) -> None:
    drafted = np.zeros((len(outcomes), 8), np.int32)
    for row, each in enumerate(outcomes):
        drafted[row, : len(each.draft)] = each.draft
    recent.note(
        Step(
            [each.request_id for each in outcomes],
            ("ngram",),
            np.array([0 if each.draft else -1 for each in outcomes], np.int32),
            np.array([len(each.draft) for each in outcomes], np.int32),
            np.array([len(each.new) - 1 if each.draft else 0 for each in outcomes], np.int32),
            np.array([len(each.new) for each in outcomes], np.int32),
            [list(each.new) for each in outcomes] if recent.with_tokens else None,
            drafted if recent.with_tokens else None,
        )
    )


def test_steps_are_in_order_and_the_newest_request_is_first() -> None:
    recent = RecentSteps(with_tokens=True)
    note(recent, [outcome("a", 1)])
    note(recent, [outcome("a", 2, 3, 9, draft=(2, 3, 4))])
    note(recent, [outcome("b", 7)])
    b, a = recent.requests()
    assert [step.accepted + step.own for step in b.steps] == [(7,)]
    assert [(step.accepted, step.own) for step in a.steps] == [((), (1,)), ((2, 3), (9,))]
    assert [step.source for step in a.steps] == ["", "ngram"]
    assert (a.steps[1].num_drafted, a.steps[1].num_accepted, a.steps[1].num_new) == (3, 2, 3)
    assert a.steps[1].refused == (4,)


def test_a_step_without_drafts_has_its_tokens() -> None:
    recent, none = RecentSteps(with_tokens=True), np.zeros(1, np.int32)
    recent.note(Step(["a"], (), none - 1, none, none, none + 1, [[5]]))
    (step,) = recent.requests()[0].steps
    assert (step.source, step.accepted, step.own, step.refused) == ("", (), (5,), ())


def test_without_tokens_only_lengths_and_sources_are_kept() -> None:
    recent = RecentSteps(with_tokens=False)
    note(recent, [outcome("a", 2, 9, draft=(2, 3, 4))])
    (step,) = recent.requests()[0].steps
    assert (step.source, step.num_drafted, step.num_accepted, step.num_new) == ("ngram", 3, 1, 2)
    assert step.accepted == step.own == step.refused == ()


def test_a_clients_request_id_is_not_reported() -> None:
    recent = RecentSteps()
    note(recent, [outcome("cmpl-secret", 1)])
    assert "secret" not in recent.requests()[0].request


def test_the_number_of_kept_outcomes_is_bounded() -> None:
    recent = RecentSteps(max_outcomes=4)
    for number in range(100):
        note(recent, [outcome(f"a{number}", 1), outcome(f"b{number}", 1)])
        note(recent, [])
    assert len(recent.requests()) == 4
    assert RecentSteps(max_outcomes=4).requests() == ()


def test_nothing_is_kept_if_disabled() -> None:
    recent = RecentSteps(max_outcomes=0)
    note(recent, [outcome("a", 1)])
    assert recent.requests() == ()


def test_reported_requests_and_steps_are_bounded() -> None:
    recent = RecentSteps()
    for token in range(MAX_STEPS + 9):
        note(recent, [outcome(f"{name}", token) for name in range(MAX_REQUESTS + 3)])
    reported = recent.requests()
    assert len(reported) == MAX_REQUESTS
    assert {len(request.steps) for request in reported} == {MAX_STEPS}


def test_a_tenant_gets_only_its_own_requests_even_after_their_end() -> None:
    recent = RecentSteps()
    for tenant in ("x", "y"):
        recent.began(tenant, RequestControls(tenant=tenant))
        note(recent, [outcome(tenant, 1)])
        recent.forget([tenant])
    assert len(recent.requests("x")) == len(recent.requests("y")) == 1
    assert recent.requests("x") != recent.requests("y")
    assert recent.requests("") == recent.requests("-") == ()


def test_a_request_with_learn_off_is_not_kept() -> None:
    recent = RecentSteps()
    recent.began("private", RequestControls(learn=False))
    note(recent, [outcome("private", 1), outcome("other", 1)])
    recent.forget(["private"])
    assert len(recent.requests()) == 1
