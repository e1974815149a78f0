from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import pytest

from specserve.core.metrics import HealthSnapshot, SpeculationMetrics
from specserve.core.types import Drafts, RequestControls
from specserve.sources.base import Member
from specserve.sources.guard import (
    MAX_BACKOFF_S,
    GuardedSource,
)
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
        self.stops = np.full((4, 3), -1, np.int32)
        member = Member("ngram", self.source, ("first", "second"), 8)
        self.guard = GuardedSource(
            member, self.metrics, 100, self.clock, self.offers, self.stops, first_label=3
        )

    def propose(self) -> list[list[int]] | None:
        found = self.guard.propose(batch(2), FOUR)
        if found is None:
            return None
        pairs = zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)
        return [tokens[:length] for tokens, length in pairs]

    @property
    def health(self) -> HealthSnapshot:
        (entry,) = self.metrics.snapshot().health
        return entry


def test_a_draft_is_cut_to_its_limit_and_is_among_the_offers() -> None:
    guarded = Guarded(AnsweringSource(lambda *_: drafts([(1, 2, 3, 4, 5), (6,)], labels=(0, 1))))
    assert guarded.propose() == [[1, 2, 3, 4], [6]]
    tokens, lengths, confidence, labels = guarded.offers
    assert lengths.tolist() == [4, 1, 0, 0]
    assert tokens[:2, :4].tolist() == [[1, 2, 3, 4], [6, 0, 0, 0]]
    assert confidence[:2, 0].tolist() == pytest.approx([0.9, 0.9])
    assert labels[:2].tolist() == [3, 4]


def test_a_draft_ends_before_the_first_stop_token_of_its_request() -> None:
    guarded = Guarded(AnsweringSource(lambda *_: drafts([(1, 2, 3, 4), (1, 2, 3, 4)])))
    guarded.stops[:2] = (4, 3, -1), (1, 2, 3)
    assert guarded.propose() == [[1, 2], []]
    assert guarded.offers.lengths.tolist() == [2, 0, 0, 0]
    assert guarded.health.num_errors == 0


@pytest.mark.parametrize(
    ("tokens", "confidence", "label"),
    [
        *(((1, -1), 0.5, 0), ((1, 100), 0.5, 0), ((1, 2), 1.5, 0), ((1, 2), -0.1, 0)),
        *(((1, 2), float("nan"), 0), ((1, 2), 0.5, 2)),
    ],
)
def test_a_draft_with_invalid_values_is_dropped_and_counted(
    tokens: tuple[int, ...], confidence: float, label: int
) -> None:
    made = drafts([tokens, (1, 2)], labels=(label,))
    made.confidence[0] = confidence
    guarded = Guarded(AnsweringSource(lambda *_: made))
    assert guarded.propose() == [[], [1, 2]]
    assert (guarded.health.num_errors, guarded.health.up) == (1, True)


@pytest.mark.parametrize("length", [-1, 9])
def test_a_draft_with_an_invalid_length_is_dropped(length: int) -> None:
    made = drafts([(1, 2), (1, 2)])
    made.lengths[0] = length
    assert Guarded(AnsweringSource(lambda *_: made)).propose() == [[], [1, 2]]


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


def test_errors_in_open_and_close_are_caught_and_counted() -> None:
    class Broken(AnsweringSource):
        def open(self, slot: int, controls: RequestControls) -> None:
            raise KeyError(slot)

        def close(self, slots: object) -> None:
            raise ValueError(slots)

    guarded = Guarded(Broken(always(1).answer))
    guarded.guard.open(0, RequestControls())
    guarded.guard.close(np.array([0]))
    assert guarded.health.num_errors == 2


def test_a_source_in_back_off_still_gets_open_and_close() -> None:
    guarded = Guarded(AnsweringSource(broken))
    guarded.propose()
    assert not guarded.guard.ready
    guarded.guard.open(3, RequestControls())
    guarded.guard.close(np.array([1, 2]))
    assert (guarded.source.opened, guarded.source.closed) == ([3], [1, 2])


def test_calls_that_ask_for_drafts_are_timed() -> None:
    guarded = Guarded(always(1))
    guarded.propose()
    guarded.guard.propose(batch(2), 0 * FOUR)
    assert sum(guarded.health.latency) == 1
