from __future__ import annotations

import numpy as np

from specserve.proposers.pending_states import PendingStates
from specserve.wire.messages import UInt16Array


def states(start: int, end: int) -> UInt16Array:
    """Each position's state is its number."""
    return np.arange(start, end, dtype=np.uint16)[:, None]


def numbers(pending: PendingStates, text: int, position: int = 0) -> list[int]:
    start, end = pending.start(text, position), pending.end(text)
    return pending.between(text, start, end)[:, 0].tolist() if start < end else []


def test_states_are_kept_until_they_are_confirmed() -> None:
    pending = PendingStates(100)
    pending.add(1, 0, states(0, 4))
    pending.add(1, 4, states(4, 6))
    assert numbers(pending, 1) == [0, 1, 2, 3, 4, 5]
    assert numbers(pending, 1, 3) == [3, 4, 5]
    assert pending.between(1, 1, 5)[:, 0].tolist() == [1, 2, 3, 4]
    pending.confirm(1, 5)
    assert pending.num_tokens == 2
    assert numbers(pending, 1, 5) == [5]
    pending.confirm(1, 6)
    assert (pending.num_tokens, pending.start(1, 0), pending.end(1)) == (0, 6, 6)


def test_states_that_come_again_are_taken_once() -> None:
    pending = PendingStates(100)
    pending.add(1, 0, states(0, 4))
    pending.add(1, 0, states(0, 3))
    pending.add(1, 2, states(2, 6))
    assert numbers(pending, 1) == [0, 1, 2, 3, 4, 5]


def test_after_a_gap_the_text_begins_anew() -> None:
    pending = PendingStates(100)
    pending.add(1, 0, states(0, 4))
    pending.add(1, 10, states(10, 12))
    assert numbers(pending, 1) == [10, 11]
    assert pending.num_tokens == 2


def test_the_oldest_of_all_texts_are_lost_where_there_are_too_many() -> None:
    pending = PendingStates(8)
    pending.add(1, 0, states(0, 3))
    pending.add(2, 0, states(0, 4))
    pending.add(1, 3, states(3, 6))
    assert numbers(pending, 1) == [0, 1, 2, 3, 4, 5]  # they may be sent first
    pending.trim()
    assert numbers(pending, 1) == [2, 3, 4, 5]
    assert numbers(pending, 2) == [0, 1, 2, 3]
    pending.add(3, 0, states(0, 9))
    pending.trim()
    assert (numbers(pending, 1), numbers(pending, 2)) == ([], [])
    assert numbers(pending, 3) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (pending.start(1, 0), pending.end(1)) == (6, 6)
    assert pending.num_tokens == 8


def test_what_is_kept_is_a_copy_and_ends_with_its_text() -> None:
    pending = PendingStates(8)
    step = states(0, 3)
    pending.add(1, 0, step)
    step[:] = 99
    assert numbers(pending, 1) == [0, 1, 2]
    pending.forget(1)
    pending.forget(2)
    assert (pending.num_tokens, pending.end(1)) == (0, 0)
