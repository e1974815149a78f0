"""A replica's recent records, and which of them it still has to send to the store."""

from __future__ import annotations

from itertools import chain
from math import inf

from specserve.trie.records import Ranges, Record
from specserve.trie.seen_records import SeenRecords
from specserve.trie.token_log import TokenLog
from specserve.trie.tombstones import is_purged_by

Unsent = dict[tuple[str, int], Record]
"""Records by origin and number, in sending order."""


class Outbox:
    """Recent records of this and other replicas, and which of them have to be sent.

    Normally, these are the records written since the last call. A store that has lost its memory
    gets all records that it does not list as held. Each replica sends purges first, then the
    records that it wrote, and leaves out those that the store gets from other replicas meanwhile.

    Not thread-safe.

    Args:
        origin: origin of this replica's records.
        max_bytes: memory of the records, in bytes; the oldest are dropped first.
    """

    def __init__(self, origin: str, max_bytes: int) -> None:
        self.dropped_tokens = 0
        """Own tokens that were dropped before the store confirmed them."""
        self._origin = origin
        self._log = TokenLog(max_bytes, self._drop)
        self._purges: Unsent = {}
        self._own: Unsent = {}
        self._others: Unsent = {}

    def write(self, record: Record) -> None:
        """Adds a record of this replica, which has to be sent."""
        if self._log.append(record):
            self._own[record.origin, record.number] = record

    def receive(self, record: Record) -> bool:
        """Adds a record from the store; False if it is already known or purged."""
        self._pop_unsent(record)
        if not self._log.append(record):
            return False
        if record.kind != "text":
            for unsent in (self._own, self._others):
                for each in [each for each in unsent.values() if is_purged_by(record, each)]:
                    self._pop_unsent(each)
        return True

    def pending(self, max_bytes: int) -> list[Record]:
        """The next records to send, about ``max_bytes``; they stay until :meth:`confirm`."""
        records: list[Record] = []
        num_bytes = 0
        for record in (self._purges or self._own or self._others).values():
            records.append(record)
            num_bytes += record.num_bytes
            if num_bytes >= max_bytes:
                break
        return records

    def confirm(self, records: list[Record]) -> None:
        """Marks records as processed by the store."""
        for record in records:
            self._pop_unsent(record)

    def start_over(self, held: Ranges) -> None:
        """Marks as unsent all records that a restarted store does not hold."""
        stored = SeenRecords(held)
        self._purges, self._own, self._others = {}, {}, {}
        for record in chain(self._log.tombstones.in_force(), self._log.records()):
            if not stored.has(record.origin, record.number):
                self._unsent(record)[record.origin, record.number] = record

    @property
    def is_empty(self) -> bool:
        """Whether no record has to be sent."""
        return not (self._purges or self._own or self._others)

    @property
    def oldest_unsent_stamp(self) -> float:
        """Stamp of the oldest own unsent record; infinity if there is none."""
        return next((record.stamp for record in self._own.values()), inf)

    def _unsent(self, record: Record) -> Unsent:
        if record.kind != "text":
            return self._purges
        return self._own if record.origin == self._origin else self._others

    def _pop_unsent(self, record: Record) -> Record | None:
        return self._unsent(record).pop((record.origin, record.number), None)

    def _drop(self, record: Record) -> None:
        """Called for each record that the full log drops. An unsent purge stays, as in the log."""
        if record.kind != "text":
            return
        if self._pop_unsent(record) is not None and record.origin == self._origin:
            self.dropped_tokens += record.num_tokens
