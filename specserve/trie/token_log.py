"""A bounded log of records in memory: the store's whole state, and a replica's recent past."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from specserve.trie.namespaces import is_part_of
from specserve.trie.records import MAX_RECORD_TOKENS, Ranges, Record
from specserve.trie.seen_records import SeenRecords
from specserve.trie.tombstones import Tombstones, is_meant, is_replaced

MIN_BYTES = 1 << 16
"""Smallest log: a few of the longest records."""

SLOT_BYTES = 8
"""What a forgotten record still takes until the log has moved past its position."""

SCANNED = 20_000
"""Positions that one read looks at, so that it holds nobody up for long."""


class LogState(msgspec.Struct, frozen=True):
    """All that a log holds, for a snapshot.

    Attributes:
        held: numbers of all records ever taken.
        tombstones: those in force.
        records: the texts' records, in order.
    """

    held: Ranges
    tombstones: list[Record]
    records: list[Record]


class TokenLog:
    """Records by position, the oldest dropped first; each record is taken once.

    Not safe for threads.

    Args:
        max_bytes: memory of the records, never exceeded, in bytes, at least ``MIN_BYTES``. What is
            known of origins and tombstones comes on top, at most some MB.
        on_drop: told of each record that is dropped for want of room.
    """

    def __init__(self, max_bytes: int, on_drop: Callable[[Record], None] | None = None) -> None:
        assert max_bytes >= MIN_BYTES > 4 * MAX_RECORD_TOKENS
        self.held = SeenRecords()
        self.tombstones = Tombstones()
        self.end = 0
        """Position after the newest record."""
        self.num_tokens = self.num_records = self.num_bytes = 0
        """Those held."""
        self.tokens_by_namespace: Counter[str] = Counter()
        self.dropped_tokens = 0
        """Tokens of records dropped for want of room."""
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._slots: list[Record | None] = []
        self._head = 0  # slots before it are used up

    @property
    def start(self) -> int:
        """Position of the oldest record; ``end`` if there is none."""
        return self.end - (len(self._slots) - self._head)

    def append(self, record: Record) -> bool:
        """Takes a record, unless it was taken before or is to be forgotten.

        A tombstone is carried out at once, and kept so that readers do the same.
        """
        if not self.held.add(record.origin, record.number):
            return False
        if record.kind == "text" and self.tombstones.cover(record):
            return False
        record = record.with_shared_names()
        if record.kind != "text":
            self._carry_out(record)
        self._put(record)
        return True

    def since(
        self, position: int, max_bytes: int, wanted: Callable[[Record], bool] = lambda _: True
    ) -> tuple[list[Record], int, int]:
        """Reads on from a position.

        A reader for whom records were dropped is given all tombstones in force, since it may have
        missed some.

        Args:
            position: as an earlier batch told; 0 begins with the oldest record.
            max_bytes: bounds the batch, which may exceed it by one record.
            wanted: which records the reader wants.

        Returns:
            (records in the log's order, where to go on reading, positions left to read from there).
        """
        start = self.start
        missed = self.tombstones.in_force() if position < start else []
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
        """Stamp of the newest record that a purge of ``purged`` is about; 0 if there is none."""
        stamps = (each.stamp for each in self.records() if is_part_of(each.namespace, purged))
        return max(stamps, default=0.0)

    def state(self) -> LogState:
        """All of it; the log may change afterwards."""
        texts = [record for record in self.records() if record.kind == "text"]
        return LogState(self.held.ranges(), self.tombstones.in_force(), texts)

    def restore(self, state: LogState) -> None:
        """Takes what another log held, behind what this one has."""
        is_new = not self.end
        for record in (*state.tombstones, *state.records):
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
        """A record more, or with the sign -1 one less."""
        self.num_records += sign
        self.num_bytes += sign * record.num_bytes
        self.num_tokens += sign * record.num_tokens
        self.tokens_by_namespace[record.namespace] += sign * record.num_tokens
        if not self.tokens_by_namespace[record.namespace]:
            del self.tokens_by_namespace[record.namespace]

    def _carry_out(self, tombstone: Record) -> None:
        for index in range(self._head, len(self._slots)):
            record = self._slots[index]
            if record is not None and (
                is_meant(tombstone, record) or is_replaced(tombstone, record)
            ):
                self._slots[index] = None
                self._count(record, -1)
                self.num_bytes += SLOT_BYTES
        self.tombstones.keep(tombstone)
