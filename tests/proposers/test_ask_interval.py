from __future__ import annotations

from itertools import pairwise

from specserve.proposers.ask_interval import MOST_PAUSE, AskInterval

SECONDS_PER_TOKEN = 0.01


def calls(interval: AskInterval, steps: int, seconds: float, accepted: int = 0) -> list[int]:
    """Which of the next steps are calls; each takes ``seconds`` and brings ``accepted`` tokens."""
    made = []
    for step in range(steps):
        if interval.is_due(SECONDS_PER_TOKEN):
            made.append(step)
            interval.observe_call(seconds)
            if accepted:
                interval.observe_gain(accepted)
    return made


def test_a_source_that_pays_is_asked_at_every_step() -> None:
    interval = AskInterval()
    assert len(calls(interval, 500, seconds=0.0003, accepted=1)) == 500
    assert not interval.is_slow


def test_a_source_that_brings_nothing_is_asked_ever_more_seldom_up_to_a_bound() -> None:
    interval = AskInterval()
    made = calls(interval, 1000, seconds=0.0003)
    gaps = [after - before for before, after in pairwise(made)]
    assert gaps == sorted(gaps)
    assert set(gaps) == {1, 2, 4, MOST_PAUSE}
    assert interval.is_slow


def test_one_accepted_draft_brings_it_back() -> None:
    interval = AskInterval()
    calls(interval, 1000, seconds=0.0003)
    interval.observe_gain(4)
    assert len(calls(interval, 8, seconds=0.0003, accepted=1)) == 8
    assert not interval.is_slow


def test_what_a_call_may_cost_depends_on_how_much_it_brings() -> None:
    dear, cheap = AskInterval(), AskInterval()
    for interval, seconds in ((dear, 0.002), (cheap, 0.0002)):
        for _ in range(50):  # a token in ten calls
            calls(interval, 9, seconds)
            calls(interval, 1, seconds, accepted=1)
    assert dear.is_slow
    assert not cheap.is_slow


def test_one_stalled_call_does_not_silence_a_source() -> None:
    interval = AskInterval()
    calls(interval, 100, seconds=0.0003, accepted=1)
    interval.observe_call(5.0)
    interval.observe_gain(1)
    assert len(calls(interval, 20, seconds=0.0003, accepted=1)) == 20


def test_it_is_known_how_many_steps_the_next_call_is_away() -> None:
    told, asked = AskInterval(), AskInterval()
    calls(told, 100, seconds=0.0003)
    calls(asked, 100, seconds=0.0003)
    for _ in range(5):
        num_idle_steps = told.num_idle_steps
        assert calls(asked, num_idle_steps, seconds=0.0003) == []
        assert told.is_due(SECONDS_PER_TOKEN, num_idle_steps + 1)
        assert calls(asked, 1, seconds=0.0003) == [0]
    assert num_idle_steps == MOST_PAUSE - 1


def test_there_are_no_idle_steps_while_a_source_pays() -> None:
    interval = AskInterval()
    calls(interval, 100, seconds=0.0003, accepted=1)
    assert interval.num_idle_steps == 0
