"""What a replica knows and the store may not."""

from __future__ import annotations

from math import inf

from specserve.trie.pieces import Piece
from specserve.trie.records import MAX_RECORD_TOKENS, Ranges, Record
from specserve.trie.seen_records import SeenRecords
from specserve.trie.token_log import LogBatch, TokenLog


class Outbox:
    """Recent records, own and others', and which of them have to be sent.

    In calm times that is what this replica has written since the last call. A store that has lost
    its memory is sent everything that it does not name as its own: each replica begins with the
    records that it wrote itself, and leaves out what the store has got from others meanwhile.

    Not safe for threads.

    Args:
        origin: this replica.
        max_bytes: memory of the records, in bytes; the oldest are dropped first.
        vocab_size: token ids are below it.
    """

    def __init__(self, origin: str, max_bytes: int, vocab_size: int) -> None:
        self.dropped_tokens = 0
        """Own tokens that were dropped before the store had them."""
        self._origin = origin
        self._log = TokenLog(max_bytes, vocab_size, self._count_dropped)
        self._last_number = 0
        self._stored = SeenRecords()
        self._read_to = {True: 0, False: 0}  # positions in the log; of own records, of others'
        self._offered: tuple[bool, LogBatch] | None = None

    @property
    def invalid_records(self) -> int:
        """Records that were not well formed, and so are neither kept nor sent."""
        return self._log.counts.invalid_records

    def write(self, piece: Piece) -> None:
        """Makes records of a piece of this replica's text."""
        step = 4 * MAX_RECORD_TOKENS
        for begin in range(0, max(1, len(piece.tokens)), step):
            tokens = piece.tokens[begin : begin + step]
            self._last_number += 1
            self._log.append(
                Record(
                    origin=self._origin,
                    number=self._last_number,
                    stamp=piece.stamp,
                    namespace=piece.namespace,
                    sequence=piece.sequence,
                    start=piece.start + begin // 4,
                    tokens=tokens,
                    num_prompt_tokens=max(
                        0, min(piece.num_prompt_tokens - begin // 4, len(tokens) // 4)
                    ),
                    final=piece.final and begin + step >= len(piece.tokens),
                )
            )

    def receive(self, record: Record) -> bool:
        """Keeps a record that the store has handed out; False if there is no use for it."""
        self._stored.add(record.origin, record.number)
        return self._log.append(record)

    def pending(self, max_bytes: int) -> list[Record]:
        """The next records to send; the same ones until :meth:`confirm`."""
        for own in (True, False):
            batch = self._next(own, max_bytes)
            self._offered = own, batch
            if batch.records:
                return batch.records
        return []

    def confirm(self) -> None:
        """The store has dealt with what :meth:`pending` gave last."""
        assert self._offered is not None
        own, batch = self._offered
        self._read_to[own] = batch.position
        for record in batch.records:
            self._stored.add(record.origin, record.number)

    def start_over(self, held: Ranges) -> None:
        """Another start of the store, which has these records and no others."""
        self._stored = SeenRecords(held)
        self._read_to = {True: 0, False: 0}

    @property
    def oldest_unsent_stamp(self) -> float:
        """Stamp of the oldest own record that the store may lack; infinity if there is none."""
        batch = self._next(True, 1)
        return batch.records[0].stamp if batch.records else inf

    def _next(self, own: bool, max_bytes: int) -> LogBatch:
        while True:
            batch = self._log.since(
                self._read_to[own],
                max_bytes,
                lambda record: (
                    (record.origin == self._origin) == own
                    and not self._stored.has(record.origin, record.number)
                ),
            )
            if batch.records or not batch.behind:
                return batch
            self._read_to[own] = batch.position

    def _count_dropped(self, record: Record) -> None:
        if record.origin == self._origin and not self._stored.has(record.origin, record.number):
            self.dropped_tokens += record.num_tokens
