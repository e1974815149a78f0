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
from specserve.trie.replica import ReplicaOptions, TrieReplica
from specserve.trie.store import StoreOptions

_END = 1 << 62
"""A position after the end of any log."""

_CALL_S, _PATIENCE_S = 10.0, 60.0
_TEXTS_AT_ONCE, _TOKENS_AT_ONCE = 256, 1 << 20
_LOG_SHARE = 4
"""Texts of one call take at most a quarter of the log, which drops its oldest records for them."""


def write_texts(
    client: StoreClient,
    options: StoreOptions,
    namespace: str,
    texts: Iterable[tuple[Int32Array, int]],
) -> int:
    """Writes texts to the store in several calls; returns how many tokens the store has taken.

    Args:
        texts: tokens, int32 ``[n]``, and how many of the first ones are prompt.

    Raises:
        StoreError: the store refuses, has not answered for a minute, or texts were dropped.
    """
    replica = TrieReplica(
        client,
        lambda record: None,
        ReplicaOptions(
            fingerprint=options.fingerprint,
            deadline_s=_CALL_S,
            reads=False,
        ),
    )
    num_tokens = num_unsent = 0
    for number, (tokens, num_prompt_tokens) in enumerate(texts, start=1):
        name = f"{replica.origin}-{number}"
        replica.publish(TextPiece(namespace, name, 0, tokens, num_prompt_tokens, final=True))
        num_tokens += len(tokens)
        num_unsent += len(tokens)
        if number % _TEXTS_AT_ONCE == 0 or num_unsent >= _TOKENS_AT_ONCE:
            _send(replica)
            num_unsent = 0
    _send(replica)
    if dropped := replica.dropped_tokens:
        raise StoreError(f"{dropped} of {num_tokens} tokens were dropped before they were sent")
    return num_tokens


def _send(replica: TrieReplica) -> None:
    """Calls the store until no record waits."""
    answered_at = time.monotonic()
    while replica.has_unsent:
        rest_s = replica.take_turn()
        if replica.refused:
            raise StoreError(replica.refused)
        if replica.up:
            answered_at = time.monotonic()
        elif time.monotonic() > answered_at + _PATIENCE_S:
            raise StoreError(f"the draft memory has not answered for {_PATIENCE_S:g} s")
        time.sleep(rest_s)


class TextWriter:
    """Writes texts in one call to the store, which takes all of them or none; thread-safe."""

    def __init__(self, client: StoreClient, options: StoreOptions) -> None:
        self._client = client
        self._options = options
        self._origin = uuid.uuid4().hex[:16]
        self._epoch, self._num_records = "", 0
        self._lock = threading.Lock()

    def write(self, namespace: str, texts: Sequence[tuple[Int32Array, int]]) -> None:
        """Writes texts: tokens, int32 ``[n]``, and how many of the first ones are prompt.

        Raises:
            ConfigError: they are too large for the log; none was written.
            StoreError: the store does not answer, or refuses. None was written. If the message says
                so, all may have been written.
        """
        with self._lock:
            records: list[Record] = []
            for tokens, num_prompt_tokens in texts:
                number = self._num_records + len(records) + 1
                name = f"{self._origin}-{number}"
                piece = TextPiece(namespace, name, 0, tokens, num_prompt_tokens, final=True)
                records += records_of(self._origin, number, piece)
            # The first call has no texts: a store that hangs would still take them later.
            most = self._exchange([]).log_bytes // _LOG_SHARE
            if (size := sum(each.num_bytes for each in records)) > most:
                allowed = f"at most {most}, a quarter of the memory's log"
                raise ConfigError("body", f"{size} bytes of tokens", allowed)
            self._num_records += len(records)
            try:
                self._exchange(records)
            except StoreError as error:
                raise StoreError(f"{error}; it has taken all of these texts or none") from error

    def _exchange(self, records: list[Record]) -> ExchangeReply:
        request = ExchangeRequest(
            self._options.fingerprint, self._origin, self._epoch, _END, records, max_bytes=0
        )
        reply = self._client.exchange(request, _CALL_S)
        if reply.refused:
            raise StoreError(reply.refused)
        self._epoch = reply.epoch
        return reply
