"""A bounded log of records in memory, for the store and for the outbox of each replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from specserve.trie.namespaces import is_part_of
from specserve.trie.records import MAX_RECORD_TOKENS, Ranges, Record
from specserve.trie.seen_records import SeenRecords
from specserve.trie.tombstones import Tombstones, is_purged_by

MIN_BYTES = 1 << 16
"""Smallest log: a few of the longest records."""

SLOT_BYTES = 8
"""Memory of a purged record's slot, which stays until the log drops its position."""

SCANNED = 20_000
"""Limit of positions that one read scans, so that other callers wait only briefly."""


class LogState(msgspec.Struct, frozen=True):
    """The content of a log, for a snapshot.

    Attributes:
        held: numbers of all records ever taken.
        records: tombstones in force, then text records in log order.
    """

    held: Ranges
    records: list[Record]


class TokenLog:
    """Records by position. A full log drops the oldest; each record is taken once.

    Not thread-safe.

    Args:
        max_bytes: limit of the records' memory in bytes, at least ``MIN_BYTES``. Record numbers of
            origins and tombstones take some MB more.
        on_drop: called with each record that the full log drops.
    """

    def __init__(self, max_bytes: int, on_drop: Callable[[Record], None] | None = None) -> None:
        assert max_bytes >= MIN_BYTES > 4 * MAX_RECORD_TOKENS
        self.held = SeenRecords()
        self.tombstones = Tombstones()
        self.end = 0
        """Position after the newest record."""
        self.num_tokens = self.num_records = self.num_bytes = 0
        """Of the records that the log holds."""
        self.tokens_by_namespace: Counter[str] = Counter()
        self.dropped_tokens = 0
        """Tokens of records that the full log dropped."""
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._slots: list[Record | None] = []
        self._head = 0  # index of the slot at ``start``
        self._tombstone_at: dict[str, int] = {}  # position of each namespace's last tombstone

    @property
    def start(self) -> int:
        """Position of the oldest record; ``end`` if there is none."""
        return self.end - (len(self._slots) - self._head)

    def append(self, record: Record) -> bool:
        """Takes a record; False if it was taken before or a tombstone covers it.

        A tombstone is applied at once. It stays in the log for the readers.
        """
        if not self.held.add(record.origin, record.number):
            return False
        if record.kind == "text" and self.tombstones.cover(record):
            return False
        record = record.with_shared_names()
        if record.kind != "text":
            self._purge(record)
            self._tombstone_at[record.namespace] = self.end
        self._put(record)
        return True

    def since(
        self, position: int, max_bytes: int, wanted: Callable[[Record], bool] = lambda _: True
    ) -> tuple[list[Record], int, int]:
        """Reads records from a position.

        A reader forgets all of a purged namespace's text, also what came after the purge. So the
        batch begins with all tombstones in force if the log has dropped records after that
        position, because the reader may have missed some, and for a new reader, because the log
        may hold older tombstones behind newer text.

        Args:
            position: returned by an earlier read; 0 begins with the oldest record.
            max_bytes: bytes of records to read; the last record may exceed it.
            wanted: whether the reader wants a record.

        Returns:
            (records in log order, position to read from next, positions left to read).
        """
        start = self.start
        missed = self.tombstones.in_force() if position < start or not position else []
        records = [each for each in missed if wanted(each)]
        position = min(max(position, start), self.end)
        offset = len(self._slots) - self.end
        stop = min(self.end, position + SCANNED)
        size = 0
        while position < stop and size < max_bytes:
            record = self._slots[position + offset]
            position += 1
            if record is not None and wanted(record):
                records.append(record)
                size += record.num_bytes
        return records, position, self.end - position

    def newest_stamp(self, purged: str) -> float:
        """Stamp of the newest text that a purge of ``purged`` covers; 0 if there is none."""
        if not self._holds_text_of(purged):
            return 0.0
        stamps = (each.stamp for each in self.records() if is_part_of(each.namespace, purged))
        return max(stamps, default=0.0)

    def state(self) -> LogState:
        """Copy of the log's content."""
        texts = [record for record in self.records() if record.kind == "text"]
        return LogState(self.held.ranges(), [*self.tombstones.in_force(), *texts])

    def restore(self, state: LogState) -> None:
        """Appends the content of another log."""
        is_new = not self.end
        for record in state.records:
            self.append(record)
        if is_new:
            self.held = SeenRecords(state.held)

    def records(self) -> Iterator[Record]:
        """All records held, the oldest first."""
        for index in range(self._head, len(self._slots)):
            record = self._slots[index]
            if record is not None:
                yield record

    def _put(self, record: Record) -> None:
        self._slots.append(record)
        self.end += 1
        self._count(record, 1)
        self._shrink()

    def _shrink(self) -> None:
        """Drops the oldest records until the rest fits."""
        while self.num_bytes > self._max_bytes and self._head < len(self._slots):
            record = self._slots[self._head]
            if record is not None and self._tombstone_at.get(record.namespace) == self.start:
                del self._tombstone_at[record.namespace]
            self._slots[self._head] = None
            self._head += 1
            if record is None:
                self.num_bytes -= SLOT_BYTES
                continue
            self._count(record, -1)
            self.dropped_tokens += record.num_tokens
            if self._on_drop is not None:
                self._on_drop(record)
        if self._head > 1024 and 2 * self._head > len(self._slots):
            del self._slots[: self._head]
            self._head = 0

    def _count(self, record: Record, sign: int) -> None:
        """Adds a record to the totals, or subtracts it if ``sign`` is -1."""
        self.num_records += sign
        self.num_bytes += sign * record.num_bytes
        self.num_tokens += sign * record.num_tokens
        self.tokens_by_namespace[record.namespace] += sign * record.num_tokens
        if not self.tokens_by_namespace[record.namespace]:
            del self.tokens_by_namespace[record.namespace]

    def _holds_text_of(self, purged: str) -> bool:
        return any(is_part_of(name, purged) for name in self.tokens_by_namespace)

    def _purge(self, tombstone: Record) -> None:
        """Removes what a tombstone covers, and the tombstone that it replaces."""
        if self._holds_text_of(tombstone.namespace):  # a scan of a large log takes long
            for index in range(self._head, len(self._slots)):
                record = self._slots[index]
                if record is not None and is_purged_by(tombstone, record):
                    self._remove(index, record)
        position = self._tombstone_at.get(tombstone.namespace, -1)
        if position >= self.start:
            index = position - self.end + len(self._slots)
            older = self._slots[index]
            if older is not None and older.stamp <= tombstone.stamp:
                self._remove(index, older)
        self.tombstones.keep(tombstone)

    def _remove(self, index: int, record: Record) -> None:
        self._slots[index] = None
        self._count(record, -1)
        self.num_bytes += SLOT_BYTES
