from __future__ import annotations

import pytest

from specserve.engine.request_slots import NO_LIMIT, RequestSlots


def add(slots: RequestSlots, *names: str) -> None:
    for name in names:
        slots.add(name, most_output=10, least_output=2)


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


def test_the_slot_of_the_one_that_waits_for_longest_is_given_away() -> None:
    slots = RequestSlots(3)
    add(slots, "a", "b")
    assert slots.victim(["c"]) is None
    add(slots, "c")
    assert slots.victim(["a", "d"]) == "b"
    slots.free(["b"])
    assert slots.victim(["a", "d"]) is None


def test_it_knows_how_much_each_may_and_must_write() -> None:
    slots = RequestSlots(2)
    slots.add("a", most_output=7, least_output=3)
    slots.add("b", most_output=9, least_output=0)
    most, least = slots.output_limits(slots.of(["b", "a"]))
    assert (most.tolist(), least.tolist()) == ([9, 7], [0, 3])


def test_a_request_may_ask_for_more_tokens_than_any_text_has() -> None:
    slots = RequestSlots(1)
    slots.add("a", most_output=10**12, least_output=10**12)
    most, least = slots.output_limits(slots.of(["a"]))
    assert most.tolist() == least.tolist() == [NO_LIMIT]


def test_more_requests_in_a_step_than_slots_are_a_mistake_of_ours() -> None:
    slots = RequestSlots(1)
    add(slots, "a")
    with pytest.raises(StopIteration):
        slots.victim(["a"])
