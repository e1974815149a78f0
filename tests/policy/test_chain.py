from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from specserve.core.metrics import HealthSnapshot, SpeculationMetrics
from specserve.core.source_config import NgramConfig
from specserve.core.types import BoolArray, DraftBatch, Float64Array, Int64Array, RequestControls
from specserve.policy.chain import NO_LIMIT, Chain, build_chain
from specserve.sources.base import Member, SourceContext
from tests.sources.answering_source import (
    AnsweringSource,
    Clock,
    always,
    batch,
    broken,
    drafts,
)

AUTO = RequestControls()


class RemoteAnswers(AnsweringSource):
    """A source in another process that has read every text."""

    waits_s = 0.0
    sees_all = False
    num_considered = 0

    def reading_s(self, batch: DraftBatch) -> Float64Array:
        self.num_considered += 1
        return np.full(len(batch.slots), self.waits_s)

    def must_see(self, slots: Int64Array) -> BoolArray:
        return np.full(len(slots), self.sees_all)

    def follow_next(self) -> bool:
        return False


class Driven:
    """A chain, and an engine that takes its steps."""

    def __init__(
        self,
        *members: Member,
        wishes: Sequence[RequestControls] = (AUTO,),
        most_output: Sequence[int] = (),
    ) -> None:
        self.metrics, self.clock = SpeculationMetrics(), Clock()
        self.chain = Chain(members, self.metrics, num_slots=8, vocab_size=100, clock=self.clock)
        for slot, controls in enumerate(wishes):
            self.chain.open(slot, controls, most_output[slot] if most_output else NO_LIMIT)
        self.size = len(wishes)
        self.sent: list[list[int]] = [[]] * self.size

    def measure(self, plain_s: float = 0.01, slope_s: float = 1e-4, num_steps: int = 10) -> None:
        for _ in range(num_steps):
            self.chain.cost.observe(self.size, 0, plain_s)
            self.chain.cost.observe(self.size, 4, plain_s + 4 * slope_s)

    def step(self, *written: Sequence[int]) -> list[list[int]]:
        """The target writes these tokens; the next drafts."""
        rows = written or [[7]] * self.size
        step = batch(self.size)
        for row, tokens in enumerate(rows):
            step.token_ids[row, 8 - len(tokens) : 8] = tokens
        num_new = np.array([len(tokens) for tokens in rows], np.int32)
        num_verified = np.array([len(tokens) for tokens in self.sent], np.int32)
        self.outcomes = self.chain.observe(step, num_new, num_verified)
        self.sent = self.chain.step(step)
        return self.sent

    def health(self, kind: str) -> HealthSnapshot:
        return next(each for each in self.metrics.snapshot().health if each.source == kind)


def fixed(kind: str, source: AnsweringSource, max_draft_len: int = 8) -> Member:
    return Member(kind, source, (kind,), max_draft_len, dynamic=False)


def dynamic(kind: str, source: AnsweringSource, *, learns: bool = False) -> Member:
    return Member(kind, source, (kind,), 8, learns=learns)


def test_where_one_source_has_no_guess_another_ones_is_sent() -> None:
    first = AnsweringSource(lambda batch, limits: drafts([(), (5,)]))
    driven = Driven(fixed("ngram", first), fixed("mtp", always(6, 7)), wishes=[AUTO, AUTO])
    assert driven.step()[0] == [6, 7]


def test_of_drafts_that_promise_the_same_the_first_sources_is_sent() -> None:
    assert Driven(fixed("ngram", always(1, 2)), fixed("trie", always(3, 4))).step() == [[1, 2]]


def test_the_source_is_chosen_whose_drafts_are_accepted_also_when_they_were_not_sent() -> None:
    driven = Driven(fixed("ngram", always(1, 2)), fixed("trie", always(3, 4)))
    driven.step()
    for _ in range(3):  # the target writes what the trie would have drafted
        driven.step([3, 4, 5] if driven.sent == [[3, 4]] else [3])
    assert driven.sent == [[3, 4]]


def test_a_request_may_switch_speculation_off_or_name_its_source() -> None:
    sources = fixed("ngram", always(5)), fixed("mtp", always(6))
    wishes = [AUTO, *(RequestControls(each) for each in ("off", "mtp", "ngram"))]
    assert Driven(*sources, wishes=wishes).step() == [[5], [], [6], [5]]


def test_a_draft_is_cut_to_the_engines_and_to_the_requests_limit() -> None:
    source = always(1, 2, 3, 4)
    wishes = [AUTO, RequestControls(max_draft_tokens=3), RequestControls(max_draft_tokens=0)]
    driven = Driven(fixed("ngram", source), wishes=wishes, most_output=(3, 9, 9))
    assert driven.step() == [[1, 2], [1, 2, 3], []]
    assert source.limits == [[2, 3, 0]]


@pytest.mark.parametrize(
    ("most_output", "least_output", "limit"), [(9, 3, 2), (2, 9, 1), (9, 0, 8)]
)
def test_no_draft_reaches_a_token_that_may_stop_while_its_first_one_may_not(
    most_output: int, least_output: int, limit: int
) -> None:
    source = always(*range(8))
    driven = Driven(fixed("ngram", source), wishes=[])
    driven.chain.open(0, AUTO, most_output, least_output)
    driven.size, driven.sent = 1, [[]]
    assert driven.step() == [list(range(limit))]


def test_a_source_that_fails_rests_and_the_next_one_takes_over() -> None:
    source = AnsweringSource(broken)
    driven = Driven(fixed("ngram", source), fixed("mtp", always(6)))
    assert driven.step() == driven.step() == [[6]]
    assert len(source.limits) == driven.health("ngram").num_errors == 1


def test_what_became_of_drafts_is_counted_and_told() -> None:
    driven = Driven(fixed("ngram", always(1, 2, 3)), wishes=[AUTO, AUTO])
    driven.step()
    driven.step([1, 2, 9], [8])
    assert driven.outcomes.tolist() == [[0, 0], [3, 3], [2, 0]]
    (counted,) = driven.metrics.snapshot().acceptance
    assert counted.accepted_at_position == (1, 1, 0)


def test_a_request_without_new_tokens_keeps_its_draft_until_it_is_verified() -> None:
    driven = Driven(fixed("ngram", always(1, 2, 3)))
    sent = driven.step()
    driven.chain.observe(batch(1), np.zeros(1, np.int32), np.zeros(1, np.int32))
    driven.sent = sent
    driven.step([1, 2, 3, 4])
    assert driven.outcomes[2].tolist() == [3]


def test_a_slot_begins_anew_with_another_request() -> None:
    driven = Driven(fixed("ngram", always(1, 2)))
    driven.step()
    driven.chain.close(np.array([0]))
    driven.chain.open(0, RequestControls("off"))
    assert driven.step([1, 2, 3]) == [[]]
    assert driven.outcomes[1].tolist() == [0]


def test_what_is_never_accepted_at_a_price_is_not_sent_any_more() -> None:
    driven = Driven(dynamic("ngram", always(1, 2, 3, 4)))
    driven.measure(slope_s=2e-3)
    sent = []
    for _ in range(80):
        sent.append(len(driven.step([9])[0]))
        driven.measure(slope_s=2e-3, num_steps=1)
    assert sum(sent[-40:]) <= 4


def test_before_plain_steps_are_measured_nothing_is_sent_at_once() -> None:
    driven = Driven(dynamic("ngram", always(1, 2)))
    assert driven.step() == [[]]
    driven.measure()
    assert driven.step([1]) == [[1, 2]]


def test_a_source_that_brings_nothing_is_asked_seldom_and_sees_texts_when_they_end() -> None:
    source = AnsweringSource(lambda batch, limits: drafts([()] * len(limits)))
    driven = Driven(dynamic("trie", source, learns=True))
    driven.measure()

    def slow_answer(batch: DraftBatch, limits: object) -> object:
        driven.clock.now += 1e-4
        return drafts([()])

    source.answer = slow_answer  # type: ignore[assignment]
    for _ in range(80):
        driven.step()
    assert driven.chain.has_unseen_texts
    num_asked = len(source.limits)
    for _ in range(40):
        driven.step()
    assert len(source.limits) - num_asked == 5
    driven.chain.finish(batch(1))
    assert source.limits[-1] == [0]


def test_of_two_sources_that_foresee_the_same_the_other_is_asked_seldom() -> None:
    sources = [always(1, 2, 3), always(1, 2, 3)]
    driven = Driven(*(dynamic(kind, each) for kind, each in zip("ab", sources, strict=True)))
    driven.measure()
    driven.chain.cost.observe(2, 16, 0.0116)

    def answer(batch: DraftBatch, limits: object) -> object:
        driven.clock.now += 1e-4
        return drafts([(1, 2, 3)])

    for each in sources:
        each.answer = answer  # type: ignore[assignment]
    for _ in range(200):
        driven.step([1, 2, 3, 4] if driven.sent[0] else [1])
    asked = sorted(len(each.limits) for each in sources)
    assert asked[1] == 200
    assert asked[0] < 60


def test_steps_are_idle_until_a_source_is_due() -> None:
    source = AnsweringSource(lambda batch, limits: drafts([()]))
    driven = Driven(dynamic("ngram", source))
    driven.measure()

    def slow_answer(batch: DraftBatch, limits: object) -> object:
        driven.clock.now += 1e-4
        return drafts([()])

    source.answer = slow_answer  # type: ignore[assignment]
    for _ in range(80):
        driven.step()
    while driven.chain.num_idle_steps(np.arange(1)) != 7:
        driven.step()
    num_asked = len(source.limits)
    driven.chain.step(batch(1), 8)
    assert len(source.limits) == num_asked + 1


def test_no_step_is_idle_while_there_is_a_draft_to_learn_from_or_a_source_always_drafts() -> None:
    driven = Driven(dynamic("ngram", always(1, 2)))
    driven.step()
    assert driven.chain.num_idle_steps(np.arange(1)) == 0
    always_asked = Driven(fixed("ngram", AnsweringSource(lambda *_: drafts([()]))))
    always_asked.step()
    assert always_asked.chain.num_idle_steps(np.arange(1)) == 0


def test_a_step_without_predictions_does_not_ask_the_source_that_drafts_from_them() -> None:
    source = always(5)
    member = Member("prediction", source, ("prediction",), 8, needs="prediction")
    predicts = RequestControls(prediction=b"1234")
    plain = Driven(member)
    plain.measure()
    assert plain.step() == [[]]
    assert plain.chain.num_idle_steps(np.arange(1)) > 0
    assert source.limits == []
    for wish, sent in ((predicts, [[5], []]), (replace(predicts, speculation="off"), [[], []])):
        driven = Driven(member, wishes=[wish, AUTO])
        driven.measure()
        assert driven.step() == sent


def test_such_a_source_is_asked_until_the_last_request_with_a_prediction_ends() -> None:
    source = always(5)
    member = Member("prediction", source, ("prediction",), 8, False, needs="prediction")
    predicts = RequestControls(prediction=b"1234")
    driven = Driven(member, wishes=[predicts, AUTO, predicts])
    for slot, sent in ((0, [[], [], [5]]), (2, [[], [], []])):
        driven.step()
        driven.chain.close(np.array([slot]))
        driven.chain.open(slot, AUTO)  # the next request in its slot
        driven.sent[slot] = []
        num_calls = len(source.limits)
        assert driven.step() == sent
        assert len(source.limits) - num_calls == any(sent)
    assert driven.chain.num_idle_steps(np.arange(3)) > 0


def test_a_prediction_does_not_have_the_source_of_grammars_asked() -> None:
    of_grammars, of_predictions = always(5), always(6)
    driven = Driven(
        Member("grammar", of_grammars, ("grammar",), 8, False, needs="grammar"),
        Member("prediction", of_predictions, ("prediction",), 8, False, needs="prediction"),
        wishes=[RequestControls(prediction=b"1234")],
    )
    assert driven.step() == [[6]]
    assert of_grammars.limits == []


def test_a_remote_source_is_asked_last_and_only_where_it_makes_a_request_better_off() -> None:
    remote = RemoteAnswers(lambda batch, limits: drafts([(6, 7)] * len(limits)))
    local = AnsweringSource(lambda batch, limits: drafts([(1, 2, 3, 4, 5, 6, 7), ()]))
    driven = Driven(dynamic("mtp", remote), dynamic("ngram", local), wishes=[AUTO, AUTO])
    driven.measure()
    driven.chain.cost.observe(2, 16, 0.0116)

    def answer(batch: DraftBatch, limits: object) -> object:
        driven.clock.now += 1e-4
        return drafts([(6, 7), (6, 7)])

    remote.answer = answer  # type: ignore[assignment]
    for _ in range(60):
        first, second = (len(draft) + 1 for draft in driven.sent)
        driven.step([1, 2, 3, 4, 5, 6, 7, 9][:first], [6, 7, 9][:second])
    assert driven.sent == [[1, 2, 3, 4, 5, 6, 7], [6, 7]]
    assert remote.limits[-1][0] == 0 < remote.limits[-1][1]


def test_a_remote_source_that_takes_longer_than_it_saves_is_left_alone_but_for_probes() -> None:
    remote = RemoteAnswers(lambda batch, limits: drafts([(6,)] * len(limits)))
    driven = Driven(dynamic("mtp", remote))
    driven.measure()

    def slow_answer(batch: DraftBatch, limits: object) -> object:
        driven.clock.now += 0.1
        return drafts([(6,)])

    remote.answer = slow_answer  # type: ignore[assignment]
    asked = []
    for _ in range(4000):
        before = len(remote.limits)
        driven.step([6, 7] if driven.sent[0] else [6])
        asked.append(any(map(any, remote.limits[before:])))
    # A call takes ten steps: one in a thousand is 1 % of the time.
    assert sum(asked[:1000]) <= 4
    assert 1 <= sum(asked[1000:]) <= 5


def test_a_remote_source_that_would_miss_something_has_a_turn_in_each_step() -> None:
    remote = RemoteAnswers(lambda batch, limits: drafts([()] * len(limits)))
    remote.sees_all = True
    driven = Driven(dynamic("mtp", remote))
    driven.measure()
    for _ in range(20):
        driven.step()
    assert len(remote.limits) == 20
    assert driven.chain.num_idle_steps(np.arange(1)) == 0


def test_a_remote_source_that_only_sees_a_step_is_considered_in_every_eighth() -> None:
    remote = RemoteAnswers(lambda batch, limits: drafts([(6,)] * len(limits)))
    remote.sees_all = True
    driven = Driven(dynamic("mtp", remote))
    driven.measure()
    for _ in range(200):
        driven.step()  # its draft is wrong
    already = remote.num_considered
    for _ in range(80):
        driven.step()
    assert remote.num_considered == already + 10
    assert len(remote.limits) == 280


def test_a_source_that_cannot_say_what_reading_takes_rests_and_is_not_asked() -> None:
    class Unreadable(RemoteAnswers):
        def reading_s(self, batch: DraftBatch) -> Float64Array:
            raise OSError("lost")

    remote = Unreadable(lambda batch, limits: drafts([(6,)] * len(limits)))
    driven = Driven(dynamic("mtp", remote), dynamic("ngram", always(1, 2)))
    driven.measure()
    for _ in range(8):
        driven.step([1, 2, 3] if driven.sent[0] else [1])
    assert driven.sent == [[1, 2]]
    assert remote.limits == []
    assert driven.health("mtp").num_errors == 1


def test_a_configured_chain_drafts_from_the_text() -> None:
    config = NgramConfig(kind="ngram", max_draft_len=3, dynamic=False)
    chain = build_chain((config,), SpeculationMetrics(), SourceContext(num_slots=4))
    chain.open(2, AUTO)
    text = np.array([[1, 2, 3, 4, 1, 2]], np.int32)
    count = np.array([6], np.int32)
    step = DraftBatch(np.array([2]), text, count, count)
    chain.observe(step, np.ones(1, np.int32), np.zeros(1, np.int32))
    assert chain.step(step) == [[3, 4, 1]]


def test_why_a_step_sends_what_it_sends_is_logged_at_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG):
        Driven(fixed("ngram", always(1, 2))).step()
    assert "drafted {'ngram': [2]}; sent [2]" in caplog.text
