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


def test_steps_are_told_by_request_in_their_order_the_newest_request_first() -> None:
    recent = RecentSteps(with_tokens=True)
    note(recent, [outcome("a", 1)])
    note(recent, [outcome("a", 2, 3, 9, draft=(2, 3, 4))])
    note(recent, [outcome("b", 7)])
    b, a = recent.requests()
    assert [step.new for step in b.steps] == [(7,)]
    assert [step.new for step in a.steps] == [(1,), (2, 3, 9)]
    assert [step.source for step in a.steps] == ["", "ngram"]
    assert (a.steps[1].num_drafted, a.steps[1].num_accepted, a.steps[1].num_new) == (3, 2, 3)
    assert a.steps[1].refused == (4,)


def test_the_tokens_of_a_step_in_which_nothing_was_drafted_are_told_too() -> None:
    recent, none = RecentSteps(with_tokens=True), np.zeros(1, np.int32)
    recent.note(Step(["a"], (), none - 1, none, none, none + 1, [[5]]))
    (step,) = recent.requests()[0].steps
    assert (step.source, step.new, step.refused) == ("", (5,), ())


def test_without_tokens_lengths_and_sources_are_told_alone() -> None:
    recent = RecentSteps(with_tokens=False)
    note(recent, [outcome("a", 2, 9, draft=(2, 3, 4))])
    (step,) = recent.requests()[0].steps
    assert (step.source, step.num_drafted, step.num_accepted, step.num_new) == ("ngram", 3, 1, 2)
    assert step.new == step.refused == ()


def test_an_id_that_a_client_may_have_chosen_is_not_told() -> None:
    recent = RecentSteps()
    note(recent, [outcome("cmpl-secret", 1)])
    assert "secret" not in recent.requests()[0].request


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    recent = RecentSteps(max_outcomes=4)
    for number in range(100):
        note(recent, [outcome(f"a{number}", 1), outcome(f"b{number}", 1)])
        note(recent, [])
    assert len(recent.requests()) == 4
    assert RecentSteps(max_outcomes=4).requests() == ()


def test_switched_off_nothing_is_kept() -> None:
    recent = RecentSteps(max_outcomes=0)
    note(recent, [outcome("a", 1)])
    assert recent.requests() == ()


def test_what_is_told_is_bounded() -> None:
    recent = RecentSteps()
    for token in range(MAX_STEPS + 9):
        note(recent, [outcome(f"{name}", token) for name in range(MAX_REQUESTS + 3)])
    told = recent.requests()
    assert len(told) == MAX_REQUESTS
    assert {len(request.steps) for request in told} == {MAX_STEPS}


def test_a_tenant_is_told_its_own_requests_alone_also_when_they_have_finished() -> None:
    recent = RecentSteps()
    for tenant in ("x", "y"):
        recent.began(tenant, RequestControls(tenant=tenant))
        note(recent, [outcome(tenant, 1)])
        recent.forget([tenant])
    assert len(recent.requests("x")) == len(recent.requests("y")) == 1
    assert recent.requests("x") != recent.requests("y")
    assert recent.requests("") == recent.requests("-") == ()


def test_a_request_that_may_not_be_remembered_is_not_kept() -> None:
    recent = RecentSteps()
    recent.began("private", RequestControls(learn=False))
    note(recent, [outcome("private", 1), outcome("other", 1)])
    recent.forget(["private"])
    assert len(recent.requests()) == 1
