from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import pytest

from specserve.core.metrics import HealthSnapshot, SpeculationMetrics
from specserve.core.types import DraftBatch, Drafts, Int32Array
from specserve.sources.base import Member
from specserve.sources.guard import MAX_BACKOFF_S, GuardedSource
from tests.sources.answering_source import AnsweringSource, Clock, always, batch, broken, drafts

FOUR = np.array([4, 4], np.int32)


@dataclass
class Guarded:
    """A guarded source with its clock, metrics and offers."""

    source: AnsweringSource
    clock: Clock = field(default_factory=Clock)
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    def __post_init__(self) -> None:
        self.offers = Drafts.empty(4, 8)
        self.batch = batch(2)
        member = Member("ngram", self.source, ("first", "second"), 8)
        self.guard = GuardedSource(member, self.metrics, self.clock, self.offers)

    def propose(self) -> list[list[int]] | None:
        if not self.guard.propose(self.batch, FOUR):
            return None
        tokens, lengths, _, _ = self.offers
        slots = self.batch.slots.tolist()
        return [tokens[slot, : lengths[slot]].tolist() for slot in slots]

    @property
    def health(self) -> HealthSnapshot:
        (entry,) = self.metrics.snapshot().health
        return entry


def test_drafts_are_written_to_the_slots_of_their_requests() -> None:
    guarded = Guarded(AnsweringSource(lambda *_: drafts([(1, 2), (3,)], labels=(0, 1))))
    guarded.batch = guarded.batch._replace(slots=np.array([3, 1]))
    guarded.offers.lengths[2] = 4
    assert guarded.propose() == [[1, 2], [3]]
    assert guarded.offers.lengths.tolist() == [0, 1, 4, 2]
    assert guarded.offers.labels.tolist() == [0, 1, 0, 0]


def test_a_source_that_fails_while_it_writes_leaves_no_draft() -> None:
    class Failing(AnsweringSource):
        def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
            super().propose(batch, limits, drafts)
            raise OSError

    guarded = Guarded(Failing(always(1, 2).answer))
    guarded.offers.lengths[2] = 4
    assert guarded.propose() is None
    assert guarded.offers.lengths.tolist() == [0, 0, 4, 0]


def test_a_source_that_writes_no_draft_for_a_request_drafts_nothing_for_it() -> None:
    guarded = Guarded(AnsweringSource(lambda *_: drafts([(1, 2), (3,)])))
    assert guarded.propose() == [[1, 2], [3]]
    guarded.source.propose = lambda batch, limits, drafts: None  # type: ignore[method-assign]
    assert guarded.propose() == [[], []]
    assert guarded.health.num_errors == 0


def test_the_back_off_of_a_failing_source_doubles_up_to_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guarded = Guarded(AnsweringSource(broken))
    rests = []
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            guarded.propose()
            began = guarded.clock.now
            while not guarded.guard.ready:
                guarded.clock.now += 0.5
            rests.append(guarded.clock.now - began)
    assert rests == [1, 2, 4, 8, 16, 32, MAX_BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_S]
    assert guarded.health.reason == "OSError: 'no route to the drafter'"
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # logged once


def test_a_source_that_answers_a_probe_is_up_and_its_back_off_restarts() -> None:
    guarded = Guarded(AnsweringSource(broken))
    for _ in range(4):
        guarded.propose()
        guarded.clock.now += MAX_BACKOFF_S
    guarded.source.answer = always(5).answer
    assert guarded.propose() == [[5], [5]]
    assert (guarded.health.up, guarded.health.reason) == (True, "")
    guarded.source.answer = broken
    guarded.propose()
    guarded.clock.now += 1.0
    assert guarded.guard.ready


def test_calls_that_ask_for_drafts_are_timed() -> None:
    guarded = Guarded(always(1))
    guarded.propose()
    guarded.guard.propose(batch(2), 0 * FOUR)
    assert sum(guarded.health.latency) == 1


def test_learning_first_does_not_count_as_time_of_the_drafts() -> None:
    guarded = Guarded(always(1))
    answer, unlearned = guarded.source.answer, [5.0]

    def slow(asked: DraftBatch, limits: Int32Array) -> Drafts:
        guarded.clock.now += (unlearned.pop() if unlearned else 0.0) + float(limits.any())
        return answer(asked, limits)

    guarded.source.answer = slow
    assert guarded.guard.propose(guarded.batch, FOUR, learns_first=True)
    assert (guarded.guard.learn_s, guarded.guard.call_s) == (5.0, 1.0)
    unlearned.append(5.0)
    assert guarded.guard.propose(guarded.batch, FOUR)
    assert (guarded.guard.learn_s, guarded.guard.call_s) == (0.0, 6.0)
    assert guarded.offers.lengths[guarded.batch.slots].tolist() == [1, 1]
