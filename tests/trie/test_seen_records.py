from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specserve.trie.seen_records import MAX_ORIGINS, MAX_RANGES, SeenRecords


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 40))))
def test_a_number_is_seen_once_it_was_added(added: list[tuple[str, int]]) -> None:
    held, known = SeenRecords(), set()
    for origin, number in added:
        assert held.add(origin, number) == ((origin, number) not in known)
        known.add((origin, number))
    copy = SeenRecords(held.ranges())
    for origin in "abc":
        for number in range(42):
            assert held.has(origin, number) == ((origin, number) in known)
            assert copy.has(origin, number) == ((origin, number) in known)


@given(st.permutations(range(1, 30)))
def test_numbers_without_gaps_are_one_range_in_any_order(order: list[int]) -> None:
    held = SeenRecords()
    for number in order:
        held.add("a", number)
    assert held.ranges() == {"a": [(1, 29)]}


def test_the_oldest_of_too_many_gaps_is_closed() -> None:
    held = SeenRecords()
    for number in range(2, 2 * (MAX_RANGES + 1) + 1, 2):
        held.add("a", number)
    assert len(held.ranges()["a"]) == MAX_RANGES
    assert held.ranges()["a"][0] == (2, 4)
    assert held.has("a", 3)
    assert not held.has("a", 5)


def test_the_origin_that_was_silent_longest_is_forgotten_first() -> None:
    held = SeenRecords()
    origins = [str(number) for number in range(MAX_ORIGINS)]
    for origin in origins:
        held.add(origin, 1)
    held.add(origins[0], 2)
    held.add("one more", 1)
    assert held.ranges().keys() == {*origins, "one more"} - {origins[1]}
