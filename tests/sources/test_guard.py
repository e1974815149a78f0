from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from specserve.core.metrics import HealthSnapshot, SpeculationMetrics
from specserve.core.types import DraftBatch, Drafts, Int32Array, Int64Array, RequestControls
from specserve.sources.guard import GuardedSource
from tests.draft_batches import draft_batch

BATCH = draft_batch({0: [1, 2, 3], 5: [4]})
LIMITS = np.array([4, 4], np.int32)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def drafts(*guesses: tuple[int, ...]) -> Drafts:
    made = Drafts.empty(len(guesses), 4)
    for row, guess in enumerate(guesses):
        made.tokens[row, : len(guess)] = guess
        made.confidence[row] = 0.5
        made.lengths[row] = len(guess)
    return made


class Source:
    """Answers what it is told to, or raises it."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.closed: list[int] = []
        self.num_calls = 0

    def open(self, slot: int, controls: RequestControls) -> None: ...

    def propose(self, batch: DraftBatch, limits: Int32Array) -> Drafts:
        self.num_calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer() if callable(self.answer) else self.answer  # type: ignore[return-value]

    def close(self, slots: Int64Array) -> None:
        self.closed += slots.tolist()
        if isinstance(self.answer, Exception):
            raise self.answer


@pytest.fixture
def metrics() -> SpeculationMetrics:
    return SpeculationMetrics(("mtp",))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def guarded(metrics: SpeculationMetrics, clock: Clock) -> Callable[[Source], GuardedSource]:
    return lambda source: GuardedSource("mtp", source, metrics, 100, 2, clock)


def health(metrics: SpeculationMetrics) -> HealthSnapshot:
    (entry,) = metrics.snapshot().health
    return entry


def sent(found: Drafts | None) -> list[list[int]]:
    assert found is not None
    return [row[:length].tolist() for row, length in zip(found.tokens, found.lengths, strict=True)]


def test_drafts_are_cut_to_their_limits(guarded: Callable[[Source], GuardedSource]) -> None:
    guard = guarded(Source(lambda: drafts((1, 2, 3), (4, 5, 6))))
    assert sent(guard.propose(BATCH, np.array([2, 0], np.int32))) == [[1, 2], []]


def spoilt(array: str, value: float) -> Drafts:
    made = drafts((1, 2), (3, 4))
    getattr(made, array)[0] = value
    return made


@pytest.mark.parametrize(
    ("array", "value"),
    [
        ("tokens", -1),
        ("tokens", 100),
        ("lengths", -1),
        ("lengths", 5),
        ("confidence", -0.1),
        ("confidence", 1.5),
        ("confidence", np.nan),
        ("labels", 2),
    ],
)
def test_a_malformed_draft_is_dropped_and_counted_and_the_others_are_kept(
    guarded: Callable[[Source], GuardedSource],
    metrics: SpeculationMetrics,
    array: str,
    value: float,
) -> None:
    guard = guarded(Source(spoilt(array, value)))
    assert sent(guard.propose(BATCH, LIMITS)) == [[], [3, 4]]
    assert (health(metrics).num_errors, health(metrics).up) == (1, True)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        drafts((1,)),
        drafts((1,), (2,), (3,)),
        drafts((1,), (2,))._replace(confidence=np.zeros((2, 1), np.float32)),
        drafts((1,), (2,))._replace(tokens=np.zeros(2, np.int32)),
        drafts((1,), (2,))._replace(lengths=np.int32(1)),  # type: ignore[arg-type]
    ],
    ids=["none", "list", "too few", "too many", "shapes", "no rows", "no array"],
)
def test_an_answer_that_is_not_the_batchs_switches_the_source_off(
    guarded: Callable[[Source], GuardedSource], metrics: SpeculationMetrics, answer: object
) -> None:
    guard = guarded(Source(answer))
    assert guard.propose(BATCH, LIMITS) is None
    assert not health(metrics).up
    assert not guard.ready


def test_other_kinds_of_arrays_will_do(guarded: Callable[[Source], GuardedSource]) -> None:
    made = drafts((1, 2), (3, 4))
    answer = Drafts(
        made.tokens.astype(np.int64)[:, ::-1][:, ::-1],
        made.lengths.astype(np.int64),
        made.confidence.astype(np.float64),
        made.labels,
    )
    for array in answer:
        array.setflags(write=False)
    assert sent(guarded(Source(answer)).propose(BATCH, LIMITS)) == [[1, 2], [3, 4]]


def test_a_source_that_raises_is_switched_off_and_says_why_once(
    guarded: Callable[[Source], GuardedSource],
    metrics: SpeculationMetrics,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = guarded(Source(OSError("no route to the drafter")))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert guard.propose(BATCH, LIMITS) is None
    reason = "OSError: 'no route to the drafter'"
    assert (health(metrics).up, health(metrics).num_errors) == (False, 3)
    assert health(metrics).reason == reason
    (record,) = caplog.records
    assert record.getMessage() == f"draft source mtp is switched off: {reason}"


def test_each_failed_probe_doubles_the_rest_up_to_a_minute(
    guarded: Callable[[Source], GuardedSource], clock: Clock
) -> None:
    guard, called_at = guarded(Source(OSError())), []
    for _ in range(4000):
        if guard.ready:
            called_at.append(clock.now)
            guard.propose(BATCH, LIMITS)
        clock.now += 0.125
    rests = np.diff(called_at).tolist()
    assert rests[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert set(rests[7:]) == {60.0}


def test_a_source_that_answers_a_probe_is_up_again_and_rests_briefly_next_time(
    guarded: Callable[[Source], GuardedSource],
    metrics: SpeculationMetrics,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Source(OSError())
    guard = guarded(source)
    for _ in range(4):
        guard.propose(BATCH, LIMITS)
    clock.now += 8.0
    assert guard.ready
    source.answer = drafts((1,), (2,))
    with caplog.at_level(logging.WARNING):
        assert sent(guard.propose(BATCH, LIMITS)) == [[1], [2]]
    assert health(metrics).up
    assert caplog.records[-1].getMessage() == "draft source mtp is up again"
    source.answer = OSError()
    guard.propose(BATCH, LIMITS)
    clock.now += 1.0
    assert guard.ready


def test_a_resting_source_is_told_what_ends_and_its_errors_reach_nobody(
    guarded: Callable[[Source], GuardedSource], metrics: SpeculationMetrics
) -> None:
    source = Source(KeyError("close"))
    guard = guarded(source)
    guard.propose(BATCH, LIMITS)
    guard.close(np.array([0, 5]))
    assert source.closed == [0, 5]
    assert health(metrics).num_errors == 2


def test_calls_that_may_draft_are_timed(
    guarded: Callable[[Source], GuardedSource], metrics: SpeculationMetrics, clock: Clock
) -> None:
    def slow() -> Drafts:
        clock.now += 0.004
        return drafts((1,), (2,))

    guard = guarded(Source(slow))
    guard.propose(BATCH, LIMITS)
    guard.propose(BATCH, np.zeros(2, np.int32))
    assert health(metrics).latency_sum_s == pytest.approx(0.004)
    assert sum(health(metrics).latency) == 1
