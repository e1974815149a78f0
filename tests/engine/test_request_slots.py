from __future__ import annotations

import pytest

from specserve.engine.request_slots import RequestSlots


def add(slots: RequestSlots, *names: str) -> None:
    for name in names:
        slots.add(name)


def test_a_request_keeps_its_slot_until_it_ends() -> None:
    slots = RequestSlots(4)
    add(slots, "a", "b", "c")
    assert slots.missing(["a", "d", "c"]) == ["d"]
    before = slots.of(["c", "a"]).tolist()
    slots.free(["b", "never seen"])
    add(slots, "d", "e")
    assert slots.of(["c", "a"]).tolist() == before
    assert len({*slots.of(["a", "c", "d", "e"]).tolist()}) == 4
    assert len(slots.find(["b", "never seen"])) == 0


def test_the_request_that_waits_longest_loses_its_slot() -> None:
    slots = RequestSlots(3)
    add(slots, "a", "b")
    assert slots.victim(["c"]) is None
    add(slots, "c")
    assert slots.victim(["a", "d"]) == "b"
    slots.free(["b"])
    assert slots.victim(["a", "d"]) is None


def test_a_step_cannot_have_more_requests_than_slots() -> None:
    slots = RequestSlots(1)
    add(slots, "a")
    with pytest.raises(StopIteration):
        slots.victim(["a"])
