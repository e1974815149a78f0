"""What a replica knows and the store may not."""

from __future__ import annotations

from itertools import chain
from math import inf

from specserve.trie.records import Ranges, Record
from specserve.trie.seen_records import SeenRecords
from specserve.trie.token_log import TokenLog
from specserve.trie.tombstones import is_meant

Unsent = dict[tuple[str, int], Record]
"""Records by origin and number, in the order in which they are sent."""


class Outbox:
    """Recent records, own and others', and which of them have to be sent.

    In calm times that is what this replica has written since the last call. A store that has lost
    its memory is sent everything that it does not name as its own: each replica begins with the
    records that it wrote itself, and leaves out what the store has got from others meanwhile.

    Not safe for threads.

    Args:
        origin: this replica.
        max_bytes: memory of the records, in bytes; the oldest are dropped first.
    """

    def __init__(self, origin: str, max_bytes: int) -> None:
        self.dropped_tokens = 0
        """Own tokens that were dropped before the store had them."""
        self._origin = origin
        self._log = TokenLog(max_bytes, self._drop)
        self._own: Unsent = {}
        self._others: Unsent = {}

    def write(self, record: Record) -> None:
        """Keeps a record of this replica's text until it is sent, and longer."""
        if self._log.append(record):
            self._own[record.origin, record.number] = record

    def receive(self, record: Record) -> bool:
        """Keeps a record that the store has handed out; False if there is no use for it."""
        self._take_out(record)
        if not self._log.append(record):
            return False
        if record.kind != "text":
            for unsent in (self._own, self._others):
                for each in [each for each in unsent.values() if is_meant(record, each)]:
                    self._take_out(each)
        return True

    def pending(self, max_bytes: int) -> list[Record]:
        """The next records to send; the same ones until :meth:`confirm`."""
        records: list[Record] = []
        num_bytes = 0
        for record in (self._own or self._others).values():
            records.append(record)
            num_bytes += record.num_bytes
            if num_bytes >= max_bytes:
                break
        return records

    def confirm(self, records: list[Record]) -> None:
        """The store has dealt with these."""
        for record in records:
            self._take_out(record)

    def start_over(self, held: Ranges) -> None:
        """Another start of the store, which has these records and no others."""
        stored = SeenRecords(held)
        self._own, self._others = {}, {}
        for record in chain(self._log.tombstones.in_force(), self._log.records()):
            if not stored.has(record.origin, record.number):
                self._unsent(record)[record.origin, record.number] = record

    @property
    def is_empty(self) -> bool:
        """Whether the store has everything."""
        return not (self._own or self._others)

    @property
    def oldest_unsent_stamp(self) -> float:
        """Stamp of the oldest own record that the store may lack; infinity if there is none."""
        return next((record.stamp for record in self._own.values()), inf)

    def _unsent(self, record: Record) -> Unsent:
        return self._own if record.origin == self._origin else self._others

    def _take_out(self, record: Record) -> Record | None:
        return self._unsent(record).pop((record.origin, record.number), None)

    def _drop(self, record: Record) -> None:
        """The log has no room for a record any more."""
        if self._take_out(record) is not None and record.origin == self._origin:
            self.dropped_tokens += record.num_tokens
