from __future__ import annotations

import numpy as np

from specserve.sources.pending_states import PendingStates, TextStates
from specserve.wire.messages import UInt16Array


def states(start: int, end: int) -> UInt16Array:
    """Each position's state is its number."""
    return np.arange(start, end, dtype=np.uint16)[:, None]


def numbers(text: TextStates, position: int = 0) -> list[int]:
    start = text.start(position)
    return text.between(start, text.end)[:, 0].tolist() if start < text.end else []


def test_states_are_kept_until_they_are_confirmed() -> None:
    pending, text = PendingStates(100), TextStates()
    pending.add(text, 0, states(0, 4))
    pending.add(text, 4, states(4, 6))
    assert numbers(text) == [0, 1, 2, 3, 4, 5]
    assert numbers(text, 3) == [3, 4, 5]
    assert text.between(1, 5)[:, 0].tolist() == [1, 2, 3, 4]
    assert text.between(4, 5)[:, 0].tolist() == [4]
    pending.confirm(text, 5)
    assert pending.num_tokens == 2
    assert numbers(text, 5) == [5]
    pending.confirm(text, 6)
    assert (pending.num_tokens, text.start(0), text.end) == (0, 6, 6)


def test_states_that_come_again_are_taken_once() -> None:
    pending, text = PendingStates(100), TextStates()
    pending.add(text, 0, states(0, 4))
    pending.add(text, 0, states(0, 3))
    pending.add(text, 2, states(2, 6))
    assert numbers(text) == [0, 1, 2, 3, 4, 5]


def test_after_a_gap_the_text_begins_anew() -> None:
    pending, text = PendingStates(100), TextStates()
    pending.add(text, 0, states(0, 4))
    pending.add(text, 10, states(10, 12))
    assert numbers(text) == [10, 11]
    assert pending.num_tokens == 2


def test_the_oldest_of_all_texts_are_lost_where_there_are_too_many() -> None:
    pending = PendingStates(8)
    one, two, three = TextStates(), TextStates(), TextStates()
    pending.add(one, 0, states(0, 3))
    pending.add(two, 0, states(0, 4))
    pending.add(one, 3, states(3, 6))
    assert numbers(one) == [0, 1, 2, 3, 4, 5]  # they may be sent first
    pending.trim()
    assert numbers(one) == [2, 3, 4, 5]
    assert numbers(two) == [0, 1, 2, 3]
    pending.add(three, 0, states(0, 9))
    pending.trim()
    assert (numbers(one), numbers(two)) == ([], [])
    assert numbers(three) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (one.start(0), one.end) == (6, 6)
    assert pending.num_tokens == 8


def test_what_is_kept_is_a_copy_and_ends_with_its_text() -> None:
    pending, text = PendingStates(8), TextStates()
    step = states(0, 3)
    pending.add(text, 0, step)
    step[:] = 99
    assert numbers(text) == [0, 1, 2]
    pending.forget(text)
    pending.forget(TextStates())
    assert (pending.num_tokens, numbers(text)) == (0, [])


def test_what_is_confirmed_leaves_nothing_behind() -> None:
    pending, waiting, used = PendingStates(8), TextStates(), TextStates()
    pending.add(waiting, 0, states(0, 1))
    for position in range(1000):
        pending.add(used, position, states(position, position + 1))
        pending.confirm(used, position + 1)
        pending.trim()
    assert len(pending._by_age) <= 2 * 8
    assert (numbers(waiting), pending.num_tokens) == ([0], 1)
