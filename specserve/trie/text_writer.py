"""Writes given texts, without requests, into the cluster's draft memory."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Sequence

from specserve.core.errors import ConfigError, StoreError
from specserve.core.types import Int32Array
from specserve.trie.records import (
    ExchangeReply,
    ExchangeRequest,
    Record,
    StoreClient,
    TextPiece,
    records_of,
)
from specserve.trie.replica import BATCH_BYTES

_END = 1 << 62
"""A position after the end of any log."""

_CALL_S, _PATIENCE_S, _RETRY_S = 10.0, 60.0, 0.5
_LATER_S = 1e-3
_LOG_SHARE = 4
"""Texts of one call take at most a quarter of the log, which drops its oldest records for them."""


class TextWriter:
    """Writes texts to the store; thread-safe.

    The texts are newer than all purges before, although this node's clock may be late.
    """

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._origin = uuid.uuid4().hex[:16]
        self._epoch, self._num_records = "", 0
        self._newest_purge = 0.0
        self._lock = threading.Lock()

    def write(self, namespace: str, texts: Sequence[Int32Array]) -> None:
        """Writes texts in one call to the store, which takes all of them or none.

        Args:
            texts: the tokens of each, int32 ``[n]``.

        Raises:
            ConfigError: they are too large for the log; none was written.
            StoreError: the store does not answer, or refuses. None was written. If the message says
                so, all may have been written.
        """
        with self._lock:
            # The first call has no texts: a store that hangs would still take them later.
            most = self._exchange([]).log_bytes // _LOG_SHARE
            records: list[Record] = []
            for text in texts:
                records += self._records(namespace, text, self._num_records + len(records) + 1)
            if (size := sum(each.num_bytes for each in records)) > most:
                allowed = f"at most {most}, a quarter of the memory's log"
                raise ConfigError("body", f"{size} bytes of tokens", allowed)
            self._num_records += len(records)
            try:
                self._exchange(records)
            except StoreError as error:
                raise StoreError(f"{error}; it has taken all of these texts or none") from error

    def write_many(self, namespace: str, texts: Iterable[Int32Array]) -> int:
        """Writes any number of texts in several calls; returns their number of tokens.

        Args:
            texts: as in :meth:`write`.

        Raises:
            StoreError: the store refuses, has not answered for a minute, or has lost texts.
        """
        num_tokens = num_bytes = 0
        batch: list[Record] = []
        with self._lock:
            self._exchange([], _PATIENCE_S)
            first = self._num_records + 1
            for text in texts:
                for record in self._records(namespace, text, self._num_records + 1):
                    self._num_records += 1
                    batch.append(record)
                    num_tokens += record.num_tokens
                    num_bytes += record.num_bytes
                    if num_bytes >= BATCH_BYTES:
                        self._send(batch, first)
                        batch, num_bytes = [], 0
            if batch:
                self._send(batch, first)
        return num_tokens

    def _records(self, namespace: str, text: Int32Array, number: int) -> list[Record]:
        """The records of a text, numbered from ``number``."""
        stamp = max(time.time(), self._newest_purge + _LATER_S)
        piece = TextPiece(namespace, f"{self._origin}-{number}", 0, text, final=True, stamp=stamp)
        return records_of(self._origin, number, piece)

    def _send(self, records: list[Record], first: int) -> None:
        """Sends records, and checks that a restarted store still has those from ``first`` on."""
        has_called, last = bool(self._epoch), records[-1].number
        held = self._exchange(records, _PATIENCE_S).held  # empty if the store has not restarted
        ours = held.get(self._origin, [])
        if has_called and held and not any(start <= first and last <= end for start, end in ours):
            raise StoreError("the draft memory has restarted and lost texts: write them again")

    def _exchange(self, records: list[Record], patience_s: float = 0.0) -> ExchangeReply:
        """Calls the store, again for ``patience_s`` seconds; it takes repeated records once."""
        request = ExchangeRequest(self._origin, self._epoch, _END, records, max_bytes=0)
        give_up_at = time.monotonic() + patience_s
        while True:
            try:
                reply = self._client.exchange(request, _CALL_S)
                break
            except StoreError as error:
                if not patience_s:
                    raise
                if time.monotonic() > give_up_at:
                    reason = f"the draft memory has not answered for {patience_s:g} s"
                    raise StoreError(reason) from error
            time.sleep(_RETRY_S)
        if reply.refused:
            raise StoreError(reply.refused)
        self._epoch, self._newest_purge = reply.epoch, reply.newest_purge
        return reply
