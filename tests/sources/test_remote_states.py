"""The hidden states that a replica sends to an MTP drafter."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

from specserve.core.types import Int64Array, UInt16Array
from specserve.sources import remote
from specserve.sources.remote import NEAR_TOKENS
from tests.draft_batches import propose
from tests.drafters.fakes import WAIT_S, FakeDrafter, states_of
from tests.integration.cluster import eventually
from tests.sources.remote_replica import (
    HIDDEN_SIZE,
    TEXT,
    Place,
    Replica,
    hidden_states,
    replica,
    serve,
)


class Target:
    """A fake engine that passes the states of all computed tokens, refused ones included."""

    def __init__(self, made: Replica) -> None:
        self._made = made
        self.computed: dict[str, int] = {}

    def step(self, scheduled: dict[str, int], sampled: dict[str, int]) -> list[list[int]]:
        """Computes ``scheduled`` positions per request, then appends ``sampled`` tokens."""
        values = []
        for name, size in scheduled.items():
            start = self.computed[name]
            states = states_of(TEXT[: start + size], HIDDEN_SIZE)[start:].copy()
            known = len(self._made.texts[name]) + max(sampled[name] - 1, 0)
            states[max(known - start, 0) :] = 7  # of refused tokens
            values.append(states)
        hidden = hidden_states(values, [self.computed[name] for name in scheduled])
        for name, size in scheduled.items():
            new = sampled[name]
            length = len(self._made.texts[name])
            self._made.grow(name, length + new)
            self.computed[name] = length + new - 1 if new else self.computed[name] + size
        limit = 3 if all(sampled.values()) else 0
        return self._made.propose(*scheduled, limit=limit, hidden=hidden)


@pytest.fixture
def mtp(stack: ExitStack, place: Place) -> tuple[Replica, Target, FakeDrafter]:
    drafter = FakeDrafter(HIDDEN_SIZE)
    serve(stack, place, drafter)
    made = replica(stack, place, "mtp")
    made.until_up()
    return made, Target(made), drafter


Mtp = tuple[Replica, Target, FakeDrafter]


def test_a_target_with_another_tokenizer_uses_its_mtp_module(
    stack: ExitStack, place: Place
) -> None:
    serve(stack, place, FakeDrafter(HIDDEN_SIZE, "the checkpoint's"))
    replica(stack, place, "mtp").until_up()


def open_text(made: Replica, target: Target, name: str, length: int, cached: int = 0) -> None:
    made.grow(name, length)
    target.computed[name] = cached


def test_only_states_of_accepted_tokens_are_sent(mtp: Mtp) -> None:
    made, target, _ = mtp
    open_text(made, target, "a", 20)
    open_text(made, target, "b", 30)
    assert all(target.step({"a": 20, "b": 30}, {"a": 1, "b": 1}))
    for accepted in (0, 3, 1, 2, 0):
        drafts = target.step({"a": 4, "b": 4}, {"a": 1 + accepted, "b": 1})
        assert [len(draft) for draft in drafts] == [3, 3]


def test_a_text_that_the_model_fails_for_keeps_its_states(
    mtp: Mtp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # a logged error would keep its arrays alive
    monkeypatch.setattr(remote, "BACKOFF_S", 0.05)
    made, target, drafter = mtp
    open_text(made, target, "a", 20)
    open_text(made, target, "b", 30)
    drafter.poison = {1}
    drafts = target.step({"a": 20, "b": 30}, {"a": 1, "b": 1})
    assert [bool(draft) for draft in drafts] == [True, False]
    drafter.poison.clear()

    def is_drafted_for() -> bool:
        return bool(target.step({"a": 1, "b": 1}, {"a": 1, "b": 1})[1])

    eventually(is_drafted_for, "a draft of the failed text", WAIT_S, 0.01)
    assert drafter.begins == {}


def test_a_long_prompt_is_sent_during_prefill(mtp: Mtp) -> None:
    made, target, drafter = mtp
    open_text(made, target, "a", 1000)
    assert target.step({"a": 512}, {"a": 0}) == [[]]
    assert target.step({"a": 300}, {"a": 0}) == [[]]
    eventually(lambda: drafter.calls, "the first part", WAIT_S, 0.001)
    target.step({"a": 188}, {"a": 1})
    drafts: list[list[int]] = [[]]
    deadline = time.monotonic() + WAIT_S
    while drafts == [[]]:
        assert time.monotonic() < deadline
        drafts = target.step({"a": 1}, {"a": 1})
    assert drafter.begins == {}


def test_a_large_prefill_step_loses_no_states_of_other_texts(
    mtp: Mtp, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, target, drafter = mtp
    assert made.source._states is not None
    monkeypatch.setattr(made.source._states, "_max_tokens", 510)
    open_text(made, target, "a", 20)
    assert target.step({"a": 20}, {"a": 1}) != [[]]
    open_text(made, target, "long", 500)
    open_text(made, target, "longer", 600)
    draft, *_ = target.step({"a": 1, "long": 500, "longer": 600}, {"a": 1, "long": 1, "longer": 1})
    assert len(draft) == 3
    scheduled = {"a": 1, "long": 1, "longer": 1}
    draft, *_ = target.step(scheduled, scheduled)
    assert len(draft) == 3
    made.until_drafts("a", "long", "longer")
    assert drafter.begins == {}


@pytest.mark.parametrize("length", [NEAR_TOKENS - 1, 2 * NEAR_TOKENS])
def test_states_too_large_for_one_request_are_sent_text_by_text(
    stack: ExitStack, place: Place, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    drafter = FakeDrafter(HIDDEN_SIZE)
    serve(stack, place, drafter)
    made = replica(stack, place, "mtp", timeout_s=0.1)
    made.until_up()
    target = Target(made)
    monkeypatch.setattr(remote, "MAX_STATE_BYTES", 3 * length * HIDDEN_SIZE)
    monkeypatch.setattr(remote, "LOST_S", 1000.0)  # a late answer is not given up
    drafter.may_go.clear()
    for name in "ab":
        open_text(made, target, name, length)
    target.step({"a": length, "b": length}, {"a": 1, "b": 1})
    made.propose("a", "b")  # a long text is sent one step after its states
    assert len(made.source._link.sent) == 1
    drafter.may_go.set()
    made.until_drafts("a")
    made.until_drafts("b")
    assert drafter.begins == {}
    assert made.health().num_partial_texts == 0


def test_a_prompt_with_a_cached_prefix_begins_at_its_first_state(mtp: Mtp) -> None:
    made, target, drafter = mtp
    open_text(made, target, "a", 500, cached=480)
    assert target.step({"a": 20}, {"a": 1}) != [[]]
    assert list(drafter.begins.values()) == [480]
    assert drafter.calls[0][0].start == 0
    assert target.step({"a": 2}, {"a": 1}) != [[]]
    assert made.health().num_partial_texts == 1


def test_a_text_that_the_drafter_lost_begins_at_the_first_kept_state(mtp: Mtp) -> None:
    made, target, drafter = mtp
    open_text(made, target, "a", 20)
    assert target.step({"a": 20}, {"a": 1}) != [[]]
    drafter.lose()
    assert target.step({"a": 4}, {"a": 3}) == [[]]
    assert target.step({"a": 4}, {"a": 2}) != [[]]
    assert list(drafter.begins.values()) == [20]


def test_a_preempted_request_gets_drafts_again(mtp: Mtp) -> None:
    made, target, _ = mtp
    open_text(made, target, "a", 20)
    assert target.step({"a": 20}, {"a": 1}) != [[]]
    target.computed["a"] = 0
    assert target.step({"a": 21}, {"a": 1}) != [[]]
    assert target.step({"a": 1}, {"a": 1}) != [[]]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_text_without_wanted_drafts_is_sent_only_before_states_are_lost(
    is_full: bool, stack: ExitStack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = FakeDrafter(HIDDEN_SIZE)
    serve(stack, place, drafter)
    made = replica(stack, place, "mtp", dynamic=True)
    made.until_up()
    target = Target(made)
    open_text(made, target, "asked", 20)
    target.step({"asked": 20}, {"asked": 1})
    for _ in range(10):  # the source is in use now
        target.step({"asked": 1}, {"asked": 1})
    if is_full:
        monkeypatch.setattr("specserve.sources.remote.PENDING_STATES", 5 * NEAR_TOKENS)
    open_text(made, target, "new", 5 * NEAR_TOKENS)
    target.step({"new": 4 * NEAR_TOKENS}, {"new": 0})
    for _ in range(2):
        made.propose("new", limit=0)

    def read(text: int) -> int:
        return sum(row.key[1] == text for call in drafter.calls for row in call)

    before = read(0)
    target.step({"asked": 1}, {"asked": 1})
    eventually(lambda: read(0) > before, "the last step's text to be read", WAIT_S, 0.005)
    if is_full:
        eventually(lambda: read(1), "the new text to be read", WAIT_S, 0.005)
    else:
        assert not read(1)


def test_no_step_waits_for_the_states_of_a_new_prompt(stack: ExitStack, place: Place) -> None:
    drafter = FakeDrafter(HIDDEN_SIZE)
    serve(stack, place, drafter)
    made = replica(stack, place, "mtp", dynamic=True)
    made.until_up()
    made.grow("a", 5 * NEAR_TOKENS)
    states = states_of(TEXT[: 5 * NEAR_TOKENS], HIDDEN_SIZE)
    is_there = False

    def to_host(rows: Int64Array) -> Callable[[], UInt16Array]:
        def wait() -> UInt16Array:
            assert is_there, "the step waited for the copy"
            return states

        return wait

    hidden = hidden_states([states], [0])._replace(to_host=to_host)
    assert made.propose("a", hidden=hidden) == [[]]
    is_there = True
    made.propose("a", limit=0)
    eventually(lambda: drafter.calls, "the prompt to be read", WAIT_S, 0.005)
    made.until_drafts("a")
    assert drafter.begins == {}


def test_states_of_texts_without_wanted_drafts_are_not_copied(
    stack: ExitStack, place: Place
) -> None:
    serve(stack, place, FakeDrafter(HIDDEN_SIZE))
    made = replica(stack, place, "mtp", dynamic=True)
    made.until_up()
    copied: list[int] = []
    names = "abc"
    for name in names:
        made.grow(name, 20)
    states = states_of(TEXT[:20], HIDDEN_SIZE)
    hidden = hidden_states([states] * 3, [0] * 3)

    def to_host(rows: Int64Array) -> Callable[[], UInt16Array]:
        copied.extend(rows.tolist())
        return hidden.to_host(rows)

    made.propose(*names, limit=0)  # the source notices the drafter
    batch = made.batch(*names, hidden=hidden._replace(to_host=to_host))
    propose(made.source, batch, np.zeros(3, np.int32))
    assert copied == []
    assert not made.source.are_followed(batch.slots).any()
    drafts = propose(made.source, batch, np.array([0, 3, 0], np.int32))
    assert copied == [1]
    assert drafts.lengths.tolist() == [0, 3, 0]
    assert made.source.are_followed(batch.slots).tolist() == [False, True, False]
