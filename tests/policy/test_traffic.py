"""A chain of sources over some hundred steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specserve.core.types import (
    BoolArray,
    DraftBatch,
    Drafts,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.sources.followed_texts import FollowedTexts
from tests.policy.traffic import WRONG, Clock, FakeLocal, FakeRemote, Guess, Traffic

RIGHT = (1, 2, 3, 4)
SLOW_S = 0.0003


@pytest.fixture
def clock() -> Clock:
    return Clock()


def always(*tokens: int) -> Guess:
    return lambda slot: tokens


NOTHING = always()


def only(slot: int, *tokens: int) -> Guess:
    return lambda each: tokens if each == slot else ()


def traffic_of(
    clock: Clock, *guesses: Guess, slots: Sequence[int] = (0,), dynamic: bool = True
) -> Traffic:
    """Traffic with one source for each guess, in this order."""
    kinds = ("ngram", "trie", "more")
    sources = {kind: FakeLocal(guess, clock) for kind, guess in zip(kinds, guesses, strict=False)}
    return Traffic(sources, clock, slots=slots, dynamic=dynamic)


def observed(
    traffic: Traffic, new: Sequence[Sequence[int]], verified: Sequence[int], *slots: int
) -> list[list[int]]:
    """Labels, numbers of draft tokens and of accepted tokens of a step."""
    batch = traffic.batch(slots or (0,), new)
    num_new = np.array([len(each) for each in new], np.int32)
    outcomes = traffic.chain.observe(batch, num_new, np.array(verified, np.int32))
    return [each.tolist() for each in outcomes]


def test_outcomes_of_drafts_are_returned_and_counted_by_source(
    clock: Clock,
) -> None:
    traffic = traffic_of(clock, only(0, 1, 2, 3), only(1, 4, 5), slots=(0, 1, 2), dynamic=False)
    traffic.step()
    new = [[1, 2, 9], [8], [1]]
    assert observed(traffic, new, [3, 2, 0], 0, 1, 2) == [[0, 1, -1], [3, 2, 0], [2, 0, 0]]
    counted = {each.source: each for each in traffic.metrics.snapshot().acceptance}
    assert counted["ngram_1"].accepted_at_position == (1, 1, 0)
    assert counted["trie_1"].accepted_at_position == (0, 0)


def test_a_draft_that_the_scheduler_cut_counts_as_shorter(clock: Clock) -> None:
    traffic = traffic_of(clock, always(1, 2, 3), dynamic=False)
    traffic.step()
    assert observed(traffic, [[1, 2, 9]], [2]) == [[0], [2], [2]]


def test_a_draft_is_kept_for_a_request_that_a_step_skipped(clock: Clock) -> None:
    traffic = traffic_of(clock, always(1, 2), slots=(0, 1), dynamic=False)
    traffic.step()
    traffic.step(1)
    assert observed(traffic, [[1, 2, 3]], [2]) == [[0], [2], [2]]


def test_a_slots_next_request_is_not_credited_with_the_old_draft(clock: Clock) -> None:
    traffic = traffic_of(clock, always(1, 2), dynamic=False)
    traffic.step()
    traffic.close(0)
    traffic.open(0)
    assert observed(traffic, [[1, 2, 3]], [2]) == [[-1], [0], [0]]


def test_a_step_without_requests_sends_nothing(clock: Clock) -> None:
    traffic = traffic_of(clock, always(*RIGHT), slots=(), dynamic=False)
    traffic.step()
    assert traffic.sent == [0]
    traffic.open(0)
    traffic.step()
    assert traffic.drafts[0] == list(RIGHT)


def test_drafts_are_sent_even_if_steps_are_never_measured(clock: Clock) -> None:
    traffic = traffic_of(clock, always(*RIGHT))
    batch = traffic.batch([0], [[1]])
    drafts = []
    for _ in range(20):
        traffic.chain.observe(batch, np.ones(1, np.int32), np.zeros(1, np.int32))
        drafts.append(traffic.chain.step(batch))
    assert drafts[0] == [[]]
    assert drafts[-1] != [[]]


@pytest.mark.parametrize(("token_s", "least"), [(0.0075, 1), (0.0001, 0)])
def test_a_plain_step_is_measured_at_times_if_drafts_hardly_pay(
    clock: Clock, token_s: float, least: int
) -> None:
    traffic = Traffic({"ngram": FakeLocal(always(1), clock)}, clock, token_s=token_s)
    traffic.run(2000)
    assert least <= traffic.sent[200:].count(0) <= 20 * least


def without_drafts(
    clock: Clock, *kinds: str, num_steps: int = 1000, dynamic: bool = True
) -> tuple[Traffic, list[FakeLocal]]:
    sources = {kind: FakeLocal(always(), clock, SLOW_S) for kind in kinds}
    traffic = Traffic(sources, clock, dynamic=dynamic)
    traffic.run(num_steps)
    return traffic, list(sources.values())


def test_skipping_idle_steps_does_not_change_how_often_sources_are_asked(
    clock: Clock,
) -> None:
    _, stepped = without_drafts(clock, "ngram", "trie")
    traffic, skipping = without_drafts(clock, "ngram", "trie", num_steps=0)
    num_steps, slots = 1000, np.array([0])
    while num_steps > 0:
        num_idle = traffic.chain.num_idle_steps(slots)
        num_steps -= num_idle + 1
        batch = traffic.batch([0], [[1]])
        traffic.chain.cost.observe(1, 0, 0.01)
        traffic.chain.observe(batch, np.ones(1, np.int32), np.zeros(1, np.int32))
        traffic.chain.step(batch, num_idle + 1)
    assert [len(each.asked) for each in skipping] == [len(each.asked) for each in stepped]


def test_a_text_that_begins_to_repeat_gets_drafts_soon(clock: Clock) -> None:
    traffic, (source,) = without_drafts(clock, "ngram")
    source.guess = always(*RIGHT)
    traffic.run(40)
    assert traffic.sent[-10:] == [len(RIGHT)] * 10


def num_asked_of_two(
    clock: Clock, first: Guess, second: Guess, second_s: float = SLOW_S
) -> tuple[int, int]:
    """Numbers of calls of two sources in the last 400 of 600 steps."""
    sources = {
        "ngram": FakeLocal(first, clock, SLOW_S),
        "trie": FakeLocal(second, clock, second_s),
    }
    traffic = Traffic(sources, clock)
    traffic.run(200)
    for each in sources.values():
        each.asked.clear()
    traffic.run(400)
    return sources["ngram"].num_asked, sources["trie"].num_asked


class Learning(FakeLocal):
    """A source that learns for a fifth of the time since its last call."""

    def __init__(self, guess: Guess, clock: Clock) -> None:
        super().__init__(guess, clock, SLOW_S)
        self._learned_at = clock.now

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        self._clock.now += 0.2 * (self._clock.now - self._learned_at)
        self._learned_at = self._clock.now
        super().propose(batch, limits, drafts)


def test_what_a_source_has_to_learn_does_not_keep_it_in_back_off(clock: Clock) -> None:
    source = Learning(always(WRONG), clock)
    traffic = Traffic({"trie": source}, clock)
    traffic.run(300)
    num_asked = source.num_asked
    traffic.run(100)
    assert source.num_asked - num_asked < 30
    source.guess = always(*RIGHT)
    traffic.run(1000)
    num_asked = source.num_asked
    traffic.run(100)
    assert source.num_asked - num_asked == 100


def test_the_cheaper_of_two_sources_with_equal_drafts_is_asked(clock: Clock) -> None:
    num_ngram, num_trie = num_asked_of_two(clock, always(1, 2), always(1, 2), second_s=0.002)
    assert (num_ngram, num_trie < 100) == (400, True)


def test_a_source_with_longer_drafts_is_asked_in_every_step_too(clock: Clock) -> None:
    turn = iter(range(10_000))
    far = always(1, 2, 3, 4)
    near = lambda slot: (1, 2) if next(turn) % 3 else ()  # noqa: E731  # the beginning of far
    assert num_asked_of_two(clock, near, far)[1] == 400


def test_no_draft_is_sent_if_all_sources_are_in_back_off(clock: Clock) -> None:
    traffic = Traffic({"ngram": FakeLocal(OSError("gone"), clock)}, clock)
    traffic.run(5)
    assert traffic.sent == [0] * 5
    assert traffic.health("ngram").num_errors == 1


def with_remote(
    clock: Clock, remote: FakeRemote, near: Guess = NOTHING, **options: object
) -> Traffic:
    sources = {"mtp": remote, "ngram": FakeLocal(near, clock)}
    return Traffic(sources, clock, **options)  # type: ignore[arg-type]


def test_a_remote_source_is_asked_for_the_requests_that_it_drafts_better(
    clock: Clock,
) -> None:
    remote = FakeRemote(always(*RIGHT), clock, 0.002)
    traffic = with_remote(clock, remote, only(0, 1, 2, 3, 4, 5, 6, 7, 8), slots=(0, 1))
    traffic.run(300)
    assert [sorted(each.items()) for each in remote.asked[-3:]] == [[(0, 0), (1, 8)]] * 3
    assert traffic.drafts == {0: list(range(1, 9)), 1: list(RIGHT)}


@pytest.mark.parametrize(("call_s", "is_asked"), [(0.003, True), (0.05, False)])
def test_a_remote_source_is_asked_if_its_drafts_are_worth_the_call(
    clock: Clock, call_s: float, is_asked: bool
) -> None:
    remote = FakeRemote(always(*RIGHT), clock, call_s)
    traffic = with_remote(clock, remote)
    traffic.run(500)
    remote.asked.clear()
    traffic.run(500)
    assert remote.num_asked > 480 if is_asked else remote.num_asked < 10


def test_a_second_remote_source_is_asked_only_for_drafts_the_first_lacks(
    clock: Clock,
) -> None:
    first, second = (FakeRemote(only(slot, *RIGHT), clock, 0.001) for slot in (0, 1))
    traffic = Traffic({"mtp": first, "draft_model": second}, clock, slots=(0, 1))
    traffic.run(400)
    assert traffic.drafts == {0: list(RIGHT), 1: list(RIGHT)}
    same = FakeRemote(always(*RIGHT), clock, 0.001)
    traffic = Traffic({"mtp": first, "draft_model": same}, clock, slots=(0,))
    traffic.run(400)
    same.asked.clear()
    traffic.run(100)
    assert same.num_asked < 5


def test_a_fixed_remote_source_is_asked_for_all_requests(clock: Clock) -> None:
    remote = FakeRemote(always(*RIGHT), clock, 0.05)
    traffic = with_remote(clock, remote, slots=(0, 1), dynamic=False)
    traffic.run(5)
    assert remote.asked == [{0: 8, 1: 8}] * 5


def test_a_remote_source_whose_reading_s_fails_backs_off(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = FakeRemote(always(*RIGHT), clock)

    def fail(batch: object) -> None:
        raise OSError("no such text")

    monkeypatch.setattr(remote, "reading_s", fail)
    traffic = with_remote(clock, remote, always(1, 2))
    traffic.run(20)
    assert not traffic.health("mtp").up
    assert traffic.drafts[0] == [1, 2]


@pytest.mark.parametrize("guess", [NOTHING, always(*RIGHT)])
def test_a_drafter_that_was_slow_for_some_calls_is_asked_again(clock: Clock, guess: Guess) -> None:
    drafter = FakeRemote(always(*RIGHT), clock, 0.001)
    traffic = Traffic({"draft_model": drafter}, clock)
    traffic.run(300)
    assert sum(traffic.sent[-100:]) >= 300
    drafter.guess, drafter.seconds, before = guess, 0.25, drafter.num_asked
    while drafter.num_asked < before + 4:
        traffic.step()
    drafter.guess, drafter.seconds = always(*RIGHT), 0.001
    traffic.run(6000)
    assert sum(traffic.sent[-100:]) >= 300


def test_a_drafter_that_starts_before_any_measured_step_is_used_later(clock: Clock) -> None:
    drafter = FakeRemote(always(*RIGHT), clock, 0.001)
    traffic = Traffic({"draft_model": drafter}, clock)
    drafter.waits = {0: float("nan")}  # no drafter yet
    measure, traffic.chain.cost.observe = traffic.chain.cost.observe, lambda *_: None  # type: ignore[method-assign]
    traffic.run(100)
    traffic.chain.cost.observe = measure  # type: ignore[method-assign]
    drafter.waits = {}
    traffic.run(1000)
    assert sum(traffic.sent[-100:]) >= 300


class FollowingSource(FakeRemote):
    """Drafts right tokens only for texts of which it has seen each step.

    Attributes:
        is_able: whether it ever drafts right tokens.
        ages: number of steps of each text, by slot.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(self._guess, clock, seconds=0.0005)
        self.is_able = False
        self.ages: dict[int, int] = {}
        self._num_seen: dict[int, int] = {}
        self._followed = FollowedTexts(16, always=False)

    def open(self, slot: int, controls: RequestControls) -> None:
        self.ages[slot] = self._num_seen[slot] = 0
        self._followed.open(slot)

    def close(self, slots: Int64Array) -> None:
        self._followed.close(slots)

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        self._followed.note(batch.slots[limits > 0], batch.slots[:0], is_there=True)
        for slot in batch.slots[self._followed.which(batch.slots)].tolist():
            self._num_seen[slot] += 1
        super().propose(batch, limits, drafts)
        if drafts.lengths[batch.slots].any():
            self._followed.answered()

    def are_followed(self, slots: Int64Array) -> BoolArray:
        return self._followed.which(slots)

    def follow_next(self) -> bool:
        self._followed.follow_next()
        return True

    def _guess(self, slot: int) -> list[int]:
        is_whole = self._num_seen[slot] == self.ages[slot]
        return list(RIGHT) if self.is_able and is_whole else [WRONG] * len(RIGHT)


@pytest.mark.parametrize("text_steps", [20, 40])
def test_a_source_that_needs_whole_texts_is_probed_rarely_and_used_once_right(
    clock: Clock, text_steps: int
) -> None:
    source = FollowingSource(clock)
    traffic = Traffic({"mtp": source}, clock, slots=range(4))
    interval = text_steps // 4

    def run(num_steps: int) -> None:
        for step in range(num_steps):
            if step % interval == 0:  # a text ends, and another one begins
                slot = step // interval % 4
                traffic.close(slot)
                traffic.open(slot)
            for slot in source.ages:
                source.ages[slot] += 1
            traffic.step()

    run(1000)
    num_turns, num_asked = len(source.asked), source.num_asked
    run(2000)
    assert len(source.asked) - num_turns < 0.1 * 2000
    assert source.num_asked - num_asked < 0.02 * 2000
    source.is_able = True
    run(2000)
    num_asked = source.num_asked
    run(1000)
    assert source.num_asked - num_asked > 0.9 * 1000
