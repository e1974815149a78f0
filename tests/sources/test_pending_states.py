from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from specserve.core.types import Int64Array, UInt16Array
from specserve.sources.pending_states import LARGE_TOKENS, PendingStates
from tests.sources.remote_replica import hidden_states

LONG = 1 << 20


class Part(NamedTuple):
    """States ``start .. end - 1`` of a text in one step; each state's value is its position."""

    slot: int
    start: int
    end: int

    @property
    def states(self) -> UInt16Array:
        return np.arange(self.start, self.end, dtype=np.uint16)[:, None]


def add(pending: PendingStates, *parts: Part, lengths: Sequence[int] = ()) -> None:
    hidden = hidden_states([part.states for part in parts], [part.start for part in parts])
    slots = np.array([part.slot for part in parts], np.int64)
    num_tokens = np.array(lengths or [LONG] * len(parts), np.int32)
    pending.add(slots, num_tokens, hidden, np.arange(len(parts)))


def confirm(pending: PendingStates, slot: int, held: int) -> None:
    pending.confirm(slot, held)


def positions(pending: PendingStates, slot: int) -> list[int]:
    start, end = int(pending.starts[slot]), int(pending.ends[slot])
    return pending.between(slot, start, end)[:, 0].tolist() if start < end else []


@pytest.fixture
def pending() -> PendingStates:
    return PendingStates(4, 1000)


def test_states_are_kept_until_they_are_confirmed(pending: PendingStates) -> None:
    add(pending, Part(0, 0, 4), Part(1, 0, 2))
    add(pending, Part(1, 2, 3), Part(0, 4, 6))
    assert positions(pending, 0) == [0, 1, 2, 3, 4, 5]
    assert pending.between(0, 1, 5)[:, 0].tolist() == [1, 2, 3, 4]
    assert pending.between(0, 4, 5)[:, 0].tolist() == [4]
    assert positions(pending, 1) == [0, 1, 2]
    confirm(pending, 0, 4)
    assert positions(pending, 0) == [4, 5]
    confirm(pending, 0, LONG)
    assert positions(pending, 0) == []
    assert pending.num_tokens == 3


def test_states_of_refused_tokens_and_of_the_last_token_are_not_kept(
    pending: PendingStates,
) -> None:
    add(pending, Part(0, 0, 8), lengths=[6])
    assert positions(pending, 0) == [0, 1, 2, 3, 4]


def test_repeated_states_are_kept_once(pending: PendingStates) -> None:
    for part in (Part(0, 0, 4), Part(0, 0, 3), Part(0, 2, 6)):
        add(pending, part)
    assert positions(pending, 0) == [0, 1, 2, 3, 4, 5]


def test_after_a_gap_only_the_new_states_are_kept(pending: PendingStates) -> None:
    add(pending, Part(0, 0, 4))
    hidden = hidden_states([Part(0, 10, 12).states], [10])
    assert pending.first(np.array([0]), hidden).tolist() == [10]
    add(pending, Part(0, 10, 12))
    assert positions(pending, 0) == [10, 11]
    assert pending.num_tokens == 2


def test_a_slots_next_text_has_no_old_states(
    pending: PendingStates,
) -> None:
    add(pending, Part(0, 0, 4), Part(1, 0, 4))
    pending.close(0)
    assert pending.num_tokens == 4
    add(pending, Part(0, 0, 2))
    assert positions(pending, 0) == [0, 1]
    assert positions(pending, 1) == [0, 1, 2, 3]


def test_a_full_memory_evicts_the_oldest_states_of_the_longest_text() -> None:
    pending = PendingStates(3, 8)
    add(pending, Part(0, 0, 3))
    add(pending, Part(1, 100, 104))
    add(pending, Part(0, 3, 6))
    assert positions(pending, 0) == [0, 1, 2, 3, 4, 5]
    add(pending, Part(2, 0, 1))
    assert positions(pending, 0) == [3, 4, 5]
    assert positions(pending, 1) == [100, 101, 102, 103]
    assert pending.num_tokens == 8


def test_a_copy_is_waited_for_only_when_it_is_read(pending: PendingStates) -> None:
    parts = [Part(0, 0, 2), Part(1, 0, 2 * LARGE_TOKENS)]
    hidden = hidden_states([part.states for part in parts], [0, 0])
    copied: list[list[int]] = []
    waited: list[list[int]] = []

    def to_host(rows: Int64Array) -> Callable[[], UInt16Array]:
        copied.append(rows.tolist())

        def wait() -> UInt16Array:
            waited.append(rows.tolist())
            return hidden.to_host(rows)()

        return wait

    rows = np.array([0, 1])
    pending.add(rows, np.full(2, LONG, np.int32), hidden._replace(to_host=to_host), rows)
    assert copied == [[0], [1]]  # the long text has a copy of its own
    assert waited == []
    assert positions(pending, 0) == [0, 1]
    assert waited == [[0]]
    add(pending, Part(0, 2, 3))
    confirm(pending, 0, 3)
    assert positions(pending, 1) == list(range(2 * LARGE_TOKENS))
    assert waited == [[0], [1]]


def test_kept_states_do_not_hold_the_other_states_of_their_step(pending: PendingStates) -> None:
    for step in range(50):
        add(pending, *(Part(slot, step, step + 1) for slot in range(4)))
        for slot in range(1, 4):
            confirm(pending, slot, step + 1)
    add(pending)
    assert positions(pending, 0) == list(range(50))
    assert [len(piece.copy()) for piece in pending._pieces[0]] == [1] * 50
