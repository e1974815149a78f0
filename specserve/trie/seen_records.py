"""Sets of record numbers by origin, by which a log recognizes duplicates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter

from specserve.trie.records import Ranges

MAX_RANGES = 64
"""Limit of ranges for one origin. Beyond it, the gap between the two lowest ranges is closed: its
missing records then count as taken."""

MAX_ORIGINS = 4096
"""Limit of origins. Beyond it, the one whose last record was added longest ago is dropped."""


class SeenRecords:
    """Sets of record numbers by origin, stored as ranges.

    Records of one origin may come in any order: if the store loses its memory, several replicas
    send again the records that they still have.
    """

    def __init__(self, ranges: Mapping[str, Sequence[tuple[int, int]]] | None = None) -> None:
        # Ordered by last addition, the oldest first.
        self._ranges: dict[str, list[list[int]]] = {
            origin: [list(pair) for pair in pairs] for origin, pairs in (ranges or {}).items()
        }

    def has(self, origin: str, number: int) -> bool:
        """Whether the record was added."""
        ranges = self._ranges.get(origin)
        if ranges is None:
            return False
        index = bisect_right(ranges, number, key=itemgetter(0)) - 1
        return index >= 0 and number <= ranges[index][1]

    def add(self, origin: str, number: int) -> bool:
        """Adds a record; False if it was there."""
        ranges = self._ranges.pop(origin, [])
        if not ranges and len(self._ranges) >= MAX_ORIGINS:
            del self._ranges[next(iter(self._ranges))]
        self._ranges[origin] = ranges
        return _insert(ranges, number)

    def ranges(self) -> Ranges:
        """All record numbers, as inclusive ranges."""
        return {
            origin: [(first, last) for first, last in pairs]
            for origin, pairs in self._ranges.items()
        }


def _insert(ranges: list[list[int]], number: int) -> bool:
    after = bisect_right(ranges, number, key=itemgetter(0))
    before = after - 1
    if before >= 0 and number <= ranges[before][1]:
        return False
    joins_before = before >= 0 and ranges[before][1] == number - 1
    joins_after = after < len(ranges) and ranges[after][0] == number + 1
    if joins_before and joins_after:
        ranges[before][1] = ranges.pop(after)[1]
    elif joins_before:
        ranges[before][1] = number
    elif joins_after:
        ranges[after][0] = number
    else:
        ranges.insert(after, [number, number])
        if len(ranges) > MAX_RANGES:
            ranges[0][1] = ranges.pop(1)[1]
    return True
