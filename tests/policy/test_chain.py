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
    """A remote source that has read every text."""

    waits_s = 0.0
    sees_all = False
    num_considered = 0

    def reading_s(self, batch: DraftBatch) -> Float64Array:
        self.num_considered += 1
        return np.full(len(batch.slots), self.waits_s)

    def are_followed(self, slots: Int64Array) -> BoolArray:
        return np.full(len(slots), self.sees_all)

    def follow_next(self) -> bool:
        return False


class Engine:
    """A chain and a fake engine that runs its steps."""

    def __init__(
        self,
        *members: Member,
        controls: Sequence[RequestControls] = (AUTO,),
        max_output: Sequence[int] = (),
    ) -> None:
        self.metrics, self.clock = SpeculationMetrics(), Clock()
        self.chain = Chain(members, self.metrics, num_slots=8, vocab_size=100, clock=self.clock)
        for slot, each in enumerate(controls):
            self.chain.open(slot, each, max_output[slot] if max_output else NO_LIMIT)
        self.size = len(controls)
        self.sent: list[list[int]] = [[]] * self.size

    def measure(self, plain_s: float = 0.01, slope_s: float = 1e-4, num_steps: int = 10) -> None:
        for _ in range(num_steps):
            self.chain.cost.observe(self.size, 0, plain_s)
            self.chain.cost.observe(self.size, 4, plain_s + 4 * slope_s)

    def step(self, *written: Sequence[int]) -> list[list[int]]:
        """Returns the drafts that follow after the target wrote these tokens."""
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


def dynamic(kind: str, source: AnsweringSource) -> Member:
    return Member(kind, source, (kind,), 8)


def test_if_one_source_has_no_draft_another_ones_is_sent() -> None:
    first = AnsweringSource(lambda batch, limits: drafts([(), (5,)]))
    engine = Engine(fixed("ngram", first), fixed("mtp", always(6, 7)), controls=[AUTO, AUTO])
    assert engine.step()[0] == [6, 7]


def test_the_first_source_wins_among_equal_drafts() -> None:
    assert Engine(fixed("ngram", always(1, 2)), fixed("trie", always(3, 4))).step() == [[1, 2]]


def test_a_source_whose_unsent_drafts_match_the_text_is_chosen() -> None:
    engine = Engine(fixed("ngram", always(1, 2)), fixed("trie", always(3, 4)))
    engine.step()
    for _ in range(3):  # the target writes what the trie drafts
        engine.step([3, 4, 5] if engine.sent == [[3, 4]] else [3])
    assert engine.sent == [[3, 4]]


def test_a_request_may_switch_speculation_off_or_name_its_source() -> None:
    sources = fixed("ngram", always(5)), fixed("mtp", always(6))
    controls = [AUTO, *(RequestControls(each) for each in ("off", "mtp", "ngram"))]
    assert Engine(*sources, controls=controls).step() == [[5], [], [6], [5]]


def test_a_draft_is_cut_to_the_output_limit_and_to_the_draft_limit() -> None:
    source = always(1, 2, 3, 4)
    controls = [AUTO, RequestControls(max_draft_tokens=3), RequestControls(max_draft_tokens=0)]
    engine = Engine(fixed("ngram", source), controls=controls, max_output=(3, 9, 9))
    assert engine.step() == [[1, 2], [1, 2, 3], []]
    assert source.limits == [[2, 3, 0]]


@pytest.mark.parametrize(("max_output", "min_output", "limit"), [(9, 3, 2), (2, 9, 1), (9, 0, 8)])
def test_a_draft_that_starts_before_min_tokens_ends_there(
    max_output: int, min_output: int, limit: int
) -> None:
    source = always(*range(8))
    engine = Engine(fixed("ngram", source), controls=[])
    engine.chain.open(0, AUTO, max_output, min_output)
    engine.size, engine.sent = 1, [[]]
    assert engine.step() == [list(range(limit))]


def test_a_slots_next_request_has_its_own_stop_tokens() -> None:
    source = always(1, 2, 3, 4)
    engine = Engine(fixed("ngram", source), controls=[])
    engine.size, engine.sent = 1, [[]]
    many = range(3, 20)
    for stops, draft in (((9, 2), [1]), ((), [1, 2, 3, 4]), (many, [1, 2])):
        engine.chain.open(0, AUTO, stops=stops)
        assert engine.step() == [draft]
        engine.chain.close(np.array([0]))
        engine.sent = [[]]


@pytest.mark.parametrize(
    ("tokens", "confidence", "label"),
    [
        *(((1, -1), 0.5, 0), ((1, 100), 0.5, 0), ((1, 2), 1.5, 0), ((1, 2), -0.1, 0)),
        *(((1, 2), float("nan"), 0), ((1, 2), 0.5, 1)),
    ],
)
def test_a_draft_with_invalid_values_is_dropped_and_counted(
    tokens: tuple[int, ...], confidence: float, label: int
) -> None:
    made = drafts([tokens, (1, 2)], labels=(label,))
    made.confidence[0] = confidence
    source = AnsweringSource(lambda *_: made)
    engine = Engine(fixed("ngram", source), fixed("mtp", always(6)), controls=[AUTO, AUTO])
    assert engine.step() == [[6], [1, 2]]
    assert (engine.health("ngram").num_errors, engine.health("ngram").up) == (1, True)
    engine.step([6, 7], [7])
    assert engine.health("ngram").num_errors == 2


@pytest.mark.parametrize("length", [-1, 9])
def test_a_draft_with_an_invalid_length_is_dropped(length: int) -> None:
    made = drafts([(1, 2), (1, 2)])
    made.lengths[0] = length
    source = AnsweringSource(lambda *_: made)
    engine = Engine(fixed("ngram", source), controls=[AUTO, AUTO])
    assert engine.step() == [[], [1, 2]]
    assert engine.health("ngram").num_errors == 1


def test_each_label_is_that_of_its_source() -> None:
    first = AnsweringSource(lambda *_: drafts([(1, 2), ()], labels=(1, 0)))
    second = AnsweringSource(lambda *_: drafts([(), (3, 4)]))
    members = Member("ngram", first, ("one", "two"), 8, dynamic=False), fixed("mtp", second)
    engine = Engine(*members, controls=[AUTO, AUTO])
    engine.step()
    engine.step([1, 2, 3], [3, 4, 5])
    assert engine.chain.labels == ("one", "two", "mtp")
    assert engine.outcomes[0].tolist() == [1, 2]


def test_errors_in_open_and_close_are_contained_and_counted() -> None:
    class Broken(AnsweringSource):
        def open(self, slot: int, controls: RequestControls) -> None:
            raise KeyError(slot)

        def close(self, slots: object) -> None:
            raise ValueError(slots)

    engine = Engine(fixed("ngram", Broken(always(1).answer)))
    engine.chain.close(np.array([0]))
    assert engine.health("ngram").num_errors == 2


def test_a_source_in_back_off_still_gets_open_and_close() -> None:
    source = AnsweringSource(broken)
    engine = Engine(fixed("ngram", source))
    engine.step()
    engine.chain.open(3, AUTO)
    engine.chain.close(np.array([0, 3]))
    assert (source.opened, source.closed) == ([0, 3], [0, 3])


def test_a_failed_source_backs_off_and_the_next_one_drafts() -> None:
    source = AnsweringSource(broken)
    engine = Engine(fixed("ngram", source), fixed("mtp", always(6)))
    assert engine.step() == engine.step() == [[6]]
    assert len(source.limits) == engine.health("ngram").num_errors == 1


def test_outcomes_of_drafts_are_counted_and_returned() -> None:
    engine = Engine(fixed("ngram", always(1, 2, 3)), controls=[AUTO, AUTO])
    engine.step()
    engine.step([1, 2, 9], [8])
    assert engine.outcomes.tolist() == [[0, 0], [3, 3], [2, 0]]
    (counted,) = engine.metrics.snapshot().acceptance
    assert counted.accepted_at_position == (1, 1, 0)


def test_a_request_without_new_tokens_keeps_its_draft_until_it_is_verified() -> None:
    engine = Engine(fixed("ngram", always(1, 2, 3)))
    sent = engine.step()
    engine.chain.observe(batch(1), np.zeros(1, np.int32), np.zeros(1, np.int32))
    engine.sent = sent
    engine.step([1, 2, 3, 4])
    assert engine.outcomes[2].tolist() == [3]


def test_a_slots_next_request_inherits_no_draft() -> None:
    engine = Engine(fixed("ngram", always(1, 2)))
    engine.step()
    engine.chain.close(np.array([0]))
    engine.chain.open(0, RequestControls("off"))
    assert engine.step([1, 2, 3]) == [[]]
    assert engine.outcomes[1].tolist() == [0]


def test_costly_drafts_that_are_never_accepted_are_no_longer_sent() -> None:
    engine = Engine(dynamic("ngram", always(1, 2, 3, 4)))
    engine.measure(slope_s=2e-3)
    sent = []
    for _ in range(80):
        sent.append(len(engine.step([9])[0]))
        engine.measure(slope_s=2e-3, num_steps=1)
    assert sum(sent[-40:]) <= 4


def test_no_draft_is_sent_before_plain_steps_are_measured() -> None:
    engine = Engine(dynamic("ngram", always(1, 2)))
    assert engine.step() == [[]]
    engine.measure()
    assert engine.step([1]) == [[1, 2]]


def test_a_source_without_drafts_is_asked_rarely() -> None:
    source = AnsweringSource(lambda batch, limits: drafts([()] * len(limits)))
    engine = Engine(dynamic("ngram", source))
    engine.measure()

    def slow_answer(batch: DraftBatch, limits: object) -> object:
        engine.clock.now += 1e-4
        return drafts([()])

    source.answer = slow_answer  # type: ignore[assignment]
    for _ in range(80):
        engine.step()
    num_asked = source.num_asked
    for _ in range(40):
        engine.step()
    assert source.num_asked - num_asked == 5


class Learner(AnsweringSource):
    """A source that learns; ``error`` is raised when texts end."""

    def __init__(self) -> None:
        super().__init__(lambda batch, limits: drafts([()] * len(limits)))
        self.finished: list[list[int]] = []
        self.error: Exception | None = None

    def finish(self, batch: DraftBatch) -> None:
        self.finished.append(batch.slots.tolist())
        if self.error is not None:
            raise self.error


def test_only_sources_that_learn_see_ended_texts_and_their_errors_are_contained() -> None:
    learner, other = Learner(), always(1)
    engine = Engine(dynamic("trie", learner), dynamic("ngram", other))
    engine.chain.finish(batch(1))
    assert learner.finished == [[0]]
    assert not other.limits
    learner.error = OSError("disk full")
    engine.chain.finish(batch(1))
    assert engine.health("trie").num_errors == 1
    engine.chain.finish(batch(1))  # switched off
    assert len(learner.finished) == 2


def test_one_of_two_sources_with_equal_drafts_is_asked_rarely() -> None:
    sources = [always(1, 2, 3), always(1, 2, 3)]
    engine = Engine(*(dynamic(kind, each) for kind, each in zip("ab", sources, strict=True)))
    engine.measure()
    engine.chain.cost.observe(2, 16, 0.0116)

    def answer(batch: DraftBatch, limits: object) -> object:
        engine.clock.now += 1e-4
        return drafts([(1, 2, 3)])

    for each in sources:
        each.answer = answer  # type: ignore[assignment]
    for _ in range(200):
        engine.step([1, 2, 3, 4] if engine.sent[0] else [1])
    asked = sorted(each.num_asked for each in sources)
    assert asked[1] == 200
    assert asked[0] < 60


def test_steps_are_idle_until_a_source_is_due() -> None:
    source = AnsweringSource(lambda batch, limits: drafts([()]))
    engine = Engine(dynamic("ngram", source))
    engine.measure()

    def slow_answer(batch: DraftBatch, limits: object) -> object:
        engine.clock.now += 1e-4
        return drafts([()])

    source.answer = slow_answer  # type: ignore[assignment]
    for _ in range(80):
        engine.step()
    while engine.chain.num_idle_steps(np.arange(1)) != 7:
        engine.step()
    num_asked = source.num_asked
    engine.chain.step(batch(1), 8)
    assert source.num_asked == num_asked + 1


def test_no_step_is_idle_with_an_offered_draft_or_a_fixed_source() -> None:
    engine = Engine(dynamic("ngram", always(1, 2)))
    engine.step()
    assert engine.chain.num_idle_steps(np.arange(1)) == 0
    always_asked = Engine(fixed("ngram", AnsweringSource(lambda *_: drafts([()]))))
    always_asked.step()
    assert always_asked.chain.num_idle_steps(np.arange(1)) == 0


def test_the_prediction_source_is_asked_only_if_a_request_has_a_prediction() -> None:
    source = always(5)
    member = Member("prediction", source, ("prediction",), 8, needs="prediction")
    predicts = RequestControls(prediction=b"1234")
    plain = Engine(member)
    plain.measure()
    assert plain.step() == [[]]
    assert plain.chain.num_idle_steps(np.arange(1)) > 0
    assert source.limits == []
    for first, sent in ((predicts, [[5], []]), (replace(predicts, speculation="off"), [[], []])):
        engine = Engine(member, controls=[first, AUTO])
        engine.measure()
        assert engine.step() == sent


def test_the_prediction_source_is_asked_until_the_last_prediction_ends() -> None:
    source = always(5)
    member = Member("prediction", source, ("prediction",), 8, False, needs="prediction")
    predicts = RequestControls(prediction=b"1234")
    engine = Engine(member, controls=[predicts, AUTO, predicts])
    for slot, sent in ((0, [[], [], [5]]), (2, [[], [], []])):
        engine.step()
        engine.chain.close(np.array([slot]))
        engine.chain.open(slot, AUTO)  # the next request in its slot
        engine.sent[slot] = []
        num_calls = len(source.limits)
        assert engine.step() == sent
        assert len(source.limits) - num_calls == any(sent)
    assert engine.chain.num_idle_steps(np.arange(3)) > 0


def test_a_prediction_does_not_cause_a_call_of_the_grammar_source() -> None:
    of_grammars, of_predictions = always(5), always(6)
    engine = Engine(
        Member("grammar", of_grammars, ("grammar",), 8, False, needs="grammar"),
        Member("prediction", of_predictions, ("prediction",), 8, False, needs="prediction"),
        controls=[RequestControls(prediction=b"1234")],
    )
    assert engine.step() == [[6]]
    assert of_grammars.limits == []


def test_a_remote_source_is_asked_last_and_only_for_requests_that_gain() -> None:
    remote = RemoteAnswers(lambda batch, limits: drafts([(6, 7)] * len(limits)))
    local = AnsweringSource(lambda batch, limits: drafts([(1, 2, 3, 4, 5, 6, 7), ()]))
    engine = Engine(dynamic("mtp", remote), dynamic("ngram", local), controls=[AUTO, AUTO])
    engine.measure()
    engine.chain.cost.observe(2, 16, 0.0116)

    def answer(batch: DraftBatch, limits: object) -> object:
        engine.clock.now += 1e-4
        return drafts([(6, 7), (6, 7)])

    remote.answer = answer  # type: ignore[assignment]
    for _ in range(60):
        first, second = (len(draft) + 1 for draft in engine.sent)
        engine.step([1, 2, 3, 4, 5, 6, 7, 9][:first], [6, 7, 9][:second])
    assert engine.sent == [[1, 2, 3, 4, 5, 6, 7], [6, 7]]
    assert remote.limits[-1][0] == 0 < remote.limits[-1][1]


def test_a_new_request_gets_its_first_draft_from_a_local_source() -> None:
    remote = RemoteAnswers(lambda batch, limits: drafts([(6, 7, 8)] * len(limits)))
    engine = Engine(dynamic("mtp", remote), dynamic("ngram", always(1, 2, confidence=0.99)))
    engine.measure()
    engine.sent = engine.chain.draft_first(batch(1), 1)
    assert engine.sent == [[1, 2]]
    assert remote.limits == []
    engine.step([1, 2, 9])
    assert engine.outcomes.tolist() == [[0], [2], [2]]


def test_the_cost_of_a_first_draft_is_that_of_its_whole_step() -> None:
    engine = Engine(dynamic("ngram", always(1, 2, 3, 4)))
    engine.measure()
    for _ in range(10):
        engine.chain.cost.observe(8, 0, 0.01)
        engine.chain.cost.observe(8, 4, 0.05)
    assert engine.chain.draft_first(batch(1), 1) == [[1, 2, 3, 4]]
    assert engine.chain.draft_first(batch(1), 8) == [[]]


def test_a_remote_source_that_costs_more_than_it_saves_is_only_probed() -> None:
    remote = RemoteAnswers(lambda batch, limits: drafts([(6,)] * len(limits)))
    engine = Engine(dynamic("mtp", remote))
    engine.measure()

    def slow_answer(batch: DraftBatch, limits: object) -> object:
        engine.clock.now += 0.1
        return drafts([(6,)])

    remote.answer = slow_answer  # type: ignore[assignment]
    asked = []
    for _ in range(4000):
        before = len(remote.limits)
        engine.step([6, 7] if engine.sent[0] else [6])
        asked.append(any(map(any, remote.limits[before:])))
    # A call takes the time of ten steps: one call in a thousand steps is 1 % of the time.
    assert sum(asked[:1000]) <= 4
    assert 1 <= sum(asked[1000:]) <= 5


def test_a_remote_source_that_follows_a_text_is_called_in_each_step() -> None:
    remote = RemoteAnswers(lambda batch, limits: drafts([()] * len(limits)))
    remote.sees_all = True
    engine = Engine(dynamic("mtp", remote))
    engine.measure()
    for _ in range(20):
        engine.step()
    assert len(remote.limits) == 20
    assert engine.chain.num_idle_steps(np.arange(1)) == 0


def test_a_remote_source_that_only_follows_is_considered_in_few_steps() -> None:
    remote = RemoteAnswers(lambda batch, limits: drafts([(6,)] * len(limits)))
    remote.sees_all = True
    engine = Engine(dynamic("mtp", remote))
    engine.measure()
    for _ in range(200):
        engine.step()  # its draft is wrong
    already = remote.num_considered
    for _ in range(96):
        engine.step()
    assert already + 3 <= remote.num_considered <= already + 6  # a probe shortens the interval
    assert len(remote.limits) == 296


def test_a_remote_source_whose_reading_s_fails_is_not_asked() -> None:
    class Unreadable(RemoteAnswers):
        def reading_s(self, batch: DraftBatch) -> Float64Array:
            raise OSError("lost")

    remote = Unreadable(lambda batch, limits: drafts([(6,)] * len(limits)))
    engine = Engine(dynamic("mtp", remote), dynamic("ngram", always(1, 2)))
    engine.measure()
    for _ in range(8):
        engine.step([1, 2, 3] if engine.sent[0] else [1])
    assert engine.sent == [[1, 2]]
    assert remote.limits == []
    assert engine.health("mtp").num_errors == 1


def test_a_configured_chain_drafts_from_the_text() -> None:
    config = NgramConfig(kind="ngram", max_draft_len=3, dynamic=False)
    chain = build_chain((config,), SpeculationMetrics(), SourceContext(num_slots=4))
    chain.open(2, AUTO)
    text = np.array([[1, 2, 3, 4, 1, 2]], np.int32)
    count = np.array([6], np.int32)
    step = DraftBatch(np.array([2]), text, count, count)
    chain.observe(step, np.ones(1, np.int32), np.zeros(1, np.int32))
    assert chain.step(step) == [[3, 4, 1]]


def test_the_choice_of_drafts_is_logged_at_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG):
        Engine(fixed("ngram", always(1, 2))).step()
    assert "drafted {'ngram': [2]}; sent [2]" in caplog.text
