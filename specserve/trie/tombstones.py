"""Tombstones: records that say what to forget, kept against text that arrives after them."""

from __future__ import annotations

from specserve.trie.namespaces import half_of, is_part_of
from specserve.trie.records import Record

MAX_TOMBSTONES = 4096
"""Tombstones that stay in force, some 300 bytes each; the oldest are let go."""


class Tombstones:
    """The tombstones that a log has seen.

    Text may come again, from a replica that has not heard of the tombstone: it must not be taken.
    """

    def __init__(self) -> None:
        self._tombstones: dict[str, Record] = {}

    def keep(self, tombstone: Record) -> None:
        """Puts a tombstone in force, in the place of an older one about the same."""
        older = self._tombstones.pop(tombstone.namespace, None)
        if older is not None:
            tombstone = max(older, tombstone, key=lambda each: each.stamp)
        self._tombstones[tombstone.namespace] = tombstone
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def cover(self, text: Record) -> bool:
        """Whether one of them is about this text."""
        purges = map(self._tombstones.get, (half_of(text.namespace), text.namespace))
        return any(purge is not None and is_meant(purge, text) for purge in purges)

    def in_force(self) -> list[Record]:
        """All of them, the oldest first."""
        return list(self._tombstones.values())


def is_meant(tombstone: Record, text: Record) -> bool:
    """Whether a tombstone is about this text."""
    is_older = text.kind == "text" and text.stamp <= tombstone.stamp
    return is_older and is_part_of(text.namespace, tombstone.namespace)


def is_replaced(tombstone: Record, older: Record) -> bool:
    """Whether a tombstone says all that an older one does: readers need not carry out both."""
    is_about = older.kind == "purge" and older.namespace == tombstone.namespace
    return is_about and older.stamp <= tombstone.stamp
