"""Tombstones: purge records, kept so that purged text is not taken if it arrives again."""

from __future__ import annotations

from specserve.trie.namespaces import half_of, is_part_of
from specserve.trie.records import Record

MAX_TOMBSTONES = 4096
"""Limit of tombstones in force, some 300 bytes each; beyond it, the oldest is dropped."""


class Tombstones:
    """The tombstones in force in a log.

    A replica that has not read a tombstone yet may send purged text again.
    """

    def __init__(self) -> None:
        self.newest = 0.0
        """Latest stamp of a tombstone that was put in force; 0: there was none."""
        self._tombstones: dict[str, Record] = {}

    def keep(self, tombstone: Record) -> None:
        """Puts a tombstone in force; of two for one namespace, the newer one stays."""
        older = self._tombstones.pop(tombstone.namespace, None)
        if older is not None:
            tombstone = max(older, tombstone, key=lambda each: each.stamp)
        self._tombstones[tombstone.namespace] = tombstone
        self.newest = max(self.newest, tombstone.stamp)
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def cover(self, text: Record) -> bool:
        """Whether a tombstone in force covers this text."""
        purges = map(self._tombstones.get, (half_of(text.namespace), text.namespace))
        return any(purge is not None and is_purged_by(purge, text) for purge in purges)

    def in_force(self) -> list[Record]:
        """All tombstones in force, the oldest first."""
        return list(self._tombstones.values())


def is_purged_by(tombstone: Record, text: Record) -> bool:
    """Whether a tombstone covers this text."""
    is_older = text.kind == "text" and (text.began or text.stamp) <= tombstone.stamp
    return is_older and is_part_of(text.namespace, tombstone.namespace)
