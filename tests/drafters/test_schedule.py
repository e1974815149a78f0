from __future__ import annotations

import numpy as np

from specserve.drafters.base import Answer, Row
from specserve.drafters.schedule import FEED_TOKENS, Call, Schedule, Task
from tests.drafters.fakes import states_of

CLIENT = b"c"


def task(text: int, num_tokens: int, *, start: int = 0, draft: int = 0, states: int = -1) -> Task:
    """A task in its own call; its row has states from position ``states`` on."""
    tokens = np.arange(start, num_tokens, dtype=np.int32)
    row = Row(
        key=(CLIENT, text),
        salt=0,
        start=start,
        tokens=tokens,
        states_start=max(states, 0),
        states=None
        if states < 0
        else states_of(np.arange(num_tokens - 1, dtype=np.int32), 2)[states:],
        max_draft_tokens=draft,
    )
    return Task(Call(CLIENT, 1, 0.0, 0, [None]), 0, row)


def test_a_long_text_is_computed_in_pieces_and_the_last_one_drafts() -> None:
    long = task(1, 3 * FEED_TOKENS + 10, draft=3)
    starts, drafts = [], []
    while True:
        piece = long.piece()
        starts.append(piece.start)
        drafts.append(long.wants_draft)
        assert piece.tokens.tolist() == list(range(piece.start, long.row.num_tokens))
        assert piece.max_feed_tokens == FEED_TOKENS
        if not long.advance(Answer(min(piece.start + FEED_TOKENS, long.row.num_tokens))):
            break
    assert starts == [0, FEED_TOKENS, 2 * FEED_TOKENS, 3 * FEED_TOKENS]
    assert drafts == [False, False, False, True]
    assert long.call.is_done


def test_the_first_piece_has_all_tokens_and_the_next_starts_at_held() -> None:
    long = task(1, 4000, draft=3)
    first = long.piece()
    assert first.tokens.tolist() == list(range(4000))
    assert first.max_feed_tokens == FEED_TOKENS
    assert long.advance(Answer(3000 + FEED_TOKENS))
    assert long.piece().start == 3000 + FEED_TOKENS


def test_a_text_that_is_nearly_held_is_done_with_the_first_piece() -> None:
    long = task(1, 4000, draft=3)
    answer = Answer(4000, (1, 2, 3))
    assert not long.advance(answer)
    assert long.call.answers == [answer]


def test_a_row_that_is_one_piece_is_not_changed() -> None:
    short = task(1, 600, start=500, states=499, draft=1)
    assert short.piece() is short.row


def test_the_first_piece_includes_positions_without_states() -> None:
    long = task(1, 5000, states=4000)
    piece = long.piece()
    assert piece.states is not None
    assert (piece.start, piece.num_tokens, piece.states_start) == (0, 5000, 4000)
    assert (len(piece.states), piece.max_feed_tokens) == (999, FEED_TOKENS)


def test_a_text_that_the_drafter_lost_is_done() -> None:
    long = task(1, 600, start=300)
    assert not long.advance(Answer(0))
    assert long.call.answers == [Answer(0)]


def test_draft_tasks_and_feed_tasks_are_separate() -> None:
    schedule = Schedule()
    draft, feed, long = task(1, 5, draft=2), task(2, 5), task(3, 400, draft=2)
    for each in (draft, feed, long):
        schedule.add(each)
    assert schedule.drafts() == [draft]
    assert schedule.feed() == [feed]


def test_long_texts_take_turns() -> None:
    schedule = Schedule()
    first, second = task(1, 1000), task(2, 1000)
    for each in (first, second):
        schedule.add(each)
    assert schedule.feed() == [first]
    assert first.advance(Answer(FEED_TOKENS))
    schedule.rest(first)
    assert schedule.feed() == [second]


def test_short_texts_share_a_piece() -> None:
    schedule = Schedule()
    short = [task(number, 100) for number in range(4)]
    for each in short:
        schedule.add(each)
    assert schedule.feed() == short[:2]


def test_tasks_of_one_text_run_one_by_one() -> None:
    schedule = Schedule()
    first, second = task(1, 5, draft=1), task(1, 6, start=5, draft=1)
    schedule.add(first)
    schedule.add(second)
    assert schedule.drafts() == [first]
    schedule.finish(first)
    assert schedule.drafts() == [second]
    schedule.finish(second)
    assert not len(schedule)


def test_an_ended_text_and_a_dropped_call_leave_nothing() -> None:
    schedule = Schedule()
    ended, dropped = task(1, 500), task(2, 500)
    schedule.add(ended)
    schedule.add(dropped)
    schedule.end_text((CLIENT, 1))
    assert ended.call.answers == [Answer(0)]
    schedule.drop([dropped.call])
    assert not len(schedule)
