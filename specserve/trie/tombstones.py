"""Tombstones: records that say what to forget, kept against text that arrives after them."""

from __future__ import annotations

from specserve.trie.namespaces import half_of, is_part_of
from specserve.trie.records import Record

MAX_TOMBSTONES = 4096
"""Tombstones that stay in force; the oldest are let go."""


class Tombstones:
    """The tombstones that a log has seen.

    Text may come again, from a replica that has not heard of the tombstone: it must not be taken.

    Args:
        max_bytes: memory of the tombstones; the oldest are let go first, down to the last one.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        """Memory of the tombstones, in bytes."""
        self._max_bytes = max_bytes
        self._tombstones: dict[tuple[str, str], Record] = {}

    def keep(self, tombstone: Record) -> None:
        """Puts a tombstone in force, in the place of an older one about the same."""
        key = (tombstone.namespace, tombstone.sequence)
        older = self._tombstones.pop(key, None)
        if older is not None:
            self.num_bytes -= older.num_bytes
            tombstone = max(older, tombstone, key=lambda each: each.stamp)
        self._tombstones[key] = tombstone
        self.num_bytes += tombstone.num_bytes
        while len(self._tombstones) > MAX_TOMBSTONES or (
            self.num_bytes > self._max_bytes and len(self._tombstones) > 1
        ):
            self.num_bytes -= self._tombstones.pop(next(iter(self._tombstones))).num_bytes

    def cover(self, text: Record) -> bool:
        """Whether one of them is about this text."""
        if not self._tombstones:
            return False
        keys = (
            (half_of(text.namespace), ""),
            (text.namespace, ""),
            (text.namespace, text.sequence),
        )
        about_it = (self._tombstones.get(key) for key in keys)
        return any(tombstone is not None and is_meant(tombstone, text) for tombstone in about_it)

    def in_force(self) -> list[Record]:
        """All of them, the oldest first."""
        return list(self._tombstones.values())


def is_meant(tombstone: Record, text: Record) -> bool:
    """Whether a tombstone is about this text."""
    if text.kind != "text" or text.stamp > tombstone.stamp:
        return False
    if tombstone.kind == "purge":
        return is_part_of(text.namespace, tombstone.namespace)
    return (tombstone.namespace, tombstone.sequence) == (text.namespace, text.sequence)
