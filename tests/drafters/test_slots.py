"""The table of slots."""

from __future__ import annotations

import numpy as np
import pytest

from specserve.core.types import Int32Array
from specserve.drafters.slots import BLOCK, KEEP_S, Slot, SlotTable


def text(length: int, seed: int = 0) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def key(number: int) -> tuple[bytes, int]:
    return (b"client", number)


def write(table: SlotTable, number: int, tokens: Int32Array, salt: int = 0) -> Slot:
    slot = table.open(key(number), salt)
    assert slot is not None
    shared = table.restart(slot, tokens)
    table.extend(slot, tokens[shared.length :])
    return slot


def test_a_text_is_found_by_its_key_until_it_is_closed() -> None:
    table = SlotTable(2, 64)
    slot = write(table, 1, text(10))
    assert table.get(key(1)) is slot
    assert slot.length == 10
    table.close(key(1))
    table.close(key(1))
    assert table.get(key(1)) is None


def test_a_free_slot_is_taken_before_anybodys_and_the_oldest_before_a_younger_one() -> None:
    now = 0.0
    table = SlotTable(3, 64, lambda: now)
    slots = [write(table, number, text(8, number)) for number in range(3)]
    table.close(key(2))
    assert table.open(key(3), 0) is slots[2]
    table.get(key(0))
    now = KEEP_S
    assert table.open(key(4), 0) is slots[1]
    assert table.get(key(1)) is None


def test_a_text_keeps_its_slot_as_long_as_it_is_used(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    table = SlotTable(2, 64, lambda: now)
    slots = [write(table, number, text(8, number)) for number in range(2)]
    for now in (0.9 * KEEP_S, 1.8 * KEEP_S):
        assert table.get(key(0)) is slots[0]
        assert table.open(key(2), 0) is (None if now < KEEP_S else slots[1])
        assert table.open(key(3), 0) is None
    assert [record.args for record in caplog.records] == [(2,)]


def test_no_slot_is_given_where_all_are_kept() -> None:
    now = 0.0
    table = SlotTable(2, 64, lambda: now)
    write(table, 0, text(8))
    write(table, 1, text(8))
    now = KEEP_S
    assert table.open(key(2), 0, keep={key(0), key(1)}) is None
    assert table.get(key(0)) is not None


def test_a_new_text_takes_over_the_whole_blocks_that_it_shares() -> None:
    table = SlotTable(3, 128)
    first = write(table, 0, text(50))
    slot = table.open(key(1), 0)
    assert slot is not None
    begins_alike = np.concatenate([text(40), text(20, seed=1)])
    shared = table.restart(slot, begins_alike)
    assert (shared.slot, shared.length) == (first.index, 40 // BLOCK * BLOCK)
    assert slot.length == shared.length


def test_an_ended_text_is_shared_from_also_by_the_one_that_takes_its_slot() -> None:
    table = SlotTable(1, 128)
    slot = write(table, 0, text(48))
    table.close(key(0))
    taken = table.open(key(1), 0)
    assert taken is slot
    shared = table.restart(taken, text(48))
    assert (shared.slot, shared.length) == (slot.index, 48)
    table.extend(slot, text(48)[48:])
    table.close(key(1))
    again = table.open(key(2), 0)
    assert again is not None
    assert table.restart(again, text(48)).length == 48


def test_texts_of_different_salts_share_nothing() -> None:
    table = SlotTable(2, 128)
    write(table, 0, text(48), salt=1)
    slot = table.open(key(1), 2)
    assert slot is not None
    assert table.restart(slot, text(48)).length == 0


def test_what_a_slot_holds_under_another_salt_is_not_shared_with_its_next_text() -> None:
    table = SlotTable(1, 128)
    write(table, 0, text(48), salt=1)
    table.close(key(0))
    slot = table.open(key(1), 2)
    assert slot is not None
    assert table.restart(slot, text(48)).length == 0


def test_a_beginning_is_shared_as_long_as_any_slot_holds_it() -> None:
    table = SlotTable(3, 128)
    first = write(table, 0, text(48))
    second = write(table, 1, text(48))
    table.truncate(second, 0)
    slot = table.open(key(2), 0)
    assert slot is not None
    assert table.restart(slot, text(48)).slot == first.index


@pytest.mark.parametrize("kept", [0, 15, 16, 33])
def test_what_was_rolled_back_is_not_shared(kept: int) -> None:
    table = SlotTable(2, 128)
    slot = write(table, 0, text(48))
    table.truncate(slot, kept)
    table.extend(slot, text(10, seed=9))
    other = table.open(key(1), 0)
    assert other is not None
    assert table.restart(other, text(48)).length == kept // BLOCK * BLOCK


def test_a_text_whose_beginning_is_missing_is_not_shared() -> None:
    table = SlotTable(2, 128)
    slot = table.open(key(0), 0)
    assert slot is not None
    table.restart(slot, text(0))
    slot.begin = 5
    table.extend(slot, text(48))
    other = table.open(key(1), 0)
    assert other is not None
    assert table.restart(other, text(48)).length == 0
