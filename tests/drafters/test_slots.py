"""The table of slots."""

from __future__ import annotations

import numpy as np
import pytest

from specserve.core.types import Int32Array
from specserve.drafters import slots
from specserve.drafters.slots import KEEP_S, Slot, SlotTable


def text(length: int, seed: int = 0) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def key(number: int) -> tuple[bytes, int]:
    return (b"client", number)


class Table(SlotTable):
    """Records the copies in the cache: (from slot, to slot, number of entries)."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.copies: list[tuple[int, int, int]] = []
        super().__init__(num_slots, max_tokens, lambda *copy: self.copies.append(copy))


class Clock:
    """A clock that only the test moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(slots, "time", clock)
    return clock


def write(table: SlotTable, number: int, tokens: Int32Array, salt: int = 0) -> Slot:
    slot = table.open(key(number), salt)
    assert slot is not None
    table.restart(slot, tokens)
    table.extend(slot, tokens[slot.length :])
    return slot


def restarted(table: SlotTable, number: int, tokens: Int32Array, salt: int = 0) -> Slot:
    slot = table.open(key(number), salt)
    assert slot is not None
    table.restart(slot, tokens)
    return slot


def test_a_text_is_found_by_its_key_until_it_is_closed() -> None:
    table = Table(2, 64)
    slot = write(table, 1, text(10))
    assert table.get(key(1)) is slot
    assert slot.length == 10
    table.close(key(1))
    table.close(key(1))
    assert table.get(key(1)) is None


def test_a_free_slot_is_taken_first_then_the_least_recently_used(clock: Clock) -> None:
    table = Table(3, 64)
    written = [write(table, number, text(8, number)) for number in range(3)]
    table.close(key(2))
    assert table.open(key(3), 0) is written[2]
    clock.now = 1.0
    table.get(key(0))
    clock.now = KEEP_S + 1.0
    assert table.open(key(4), 0) is written[1]
    assert table.get(key(1)) is None


def test_a_text_keeps_its_slot_as_long_as_it_is_used(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    table = Table(2, 64)
    written = [write(table, number, text(8, number)) for number in range(2)]
    for clock.now in (0.9 * KEEP_S, 1.8 * KEEP_S):
        assert table.get(key(0)) is written[0]
        assert table.open(key(2), 0) is (None if clock.now < KEEP_S else written[1])
        assert table.open(key(3), 0) is None
    assert [record.args for record in caplog.records] == [(2,)]


def test_a_new_text_copies_the_longest_prefix() -> None:
    table = Table(4, 128)
    write(table, 0, text(50)[:20])
    first = write(table, 1, text(50))
    slot = restarted(table, 2, np.concatenate([text(40), text(20, seed=1)]))
    assert slot.length == 40
    assert table.copies[-1] == (first.index, slot.index, 40)
    assert table.tokens[slot.index, :40].tolist() == text(40).tolist()


def test_a_text_reuses_the_prefix_of_the_ended_text_in_its_slot() -> None:
    table = Table(1, 128)
    slot = write(table, 0, text(48))
    for number in (1, 2):
        table.close(key(number - 1))
        assert restarted(table, number, text(60)) is slot
        assert slot.length == 48
    assert table.copies == []


def test_texts_of_different_salts_share_nothing() -> None:
    table = Table(2, 128)
    write(table, 0, text(48), salt=1)
    assert restarted(table, 1, text(48), salt=2).length == 0


def test_a_slots_next_text_with_another_salt_shares_nothing() -> None:
    table = Table(1, 128)
    write(table, 0, text(48), salt=1)
    table.close(key(0))
    assert restarted(table, 1, text(48), salt=2).length == 0


@pytest.mark.parametrize("kept", [0, 16, 33])
def test_rolled_back_tokens_are_not_shared(kept: int) -> None:
    table = Table(2, 128)
    slot = write(table, 0, text(48))
    slot.length = kept
    table.extend(slot, text(10, seed=9))
    assert restarted(table, 1, text(48)).length == kept


def test_a_text_without_its_first_entries_is_not_shared() -> None:
    table = Table(1, 128)
    slot = restarted(table, 0, text(0))
    slot.begin = slot.length = 5
    table.extend(slot, text(48)[5:])
    table.close(key(0))
    again = restarted(table, 1, text(48))
    assert (again.begin, again.length) == (0, 0)


def test_num_held_counts_from_any_position() -> None:
    table = Table(1, 128)
    slot = write(table, 0, text(48))
    assert table.num_held(slot, text(60)[10:], start=10) == 38
    assert table.num_held(slot, text(48)[10:20], start=10) == 10
    assert table.num_held(slot, text(5, seed=9), start=10) == 0
    assert table.num_held(slot, text(5), start=48) == 0
