"""Writes texts that no request has written into the cluster's draft memory."""

from __future__ import annotations

import time
import uuid

from specserve.core.errors import StoreError
from specserve.core.types import Int32Array
from specserve.trie.records import ExchangeRequest, Record, StoreClient, records_of

BATCH_BYTES = 256 << 10
"""Records that one call carries."""

_CALL_S, _PATIENCE_S = 10.0, 60.0
_REST_S = 0.5


class RecordWriter:
    """Writes records as a replica does, under an origin of its own.

    Args:
        client: the way to the store.
        fingerprint: identity of the model and tokenizer.
        namespace: whose texts they are.
    """

    def __init__(self, client: StoreClient, fingerprint: str, namespace: str) -> None:
        self.num_tokens = 0
        """Tokens that the store has taken."""
        self._client = client
        self._fingerprint = fingerprint
        self._namespace = namespace
        self._origin = f"warm-{uuid.uuid4().hex[:16]}"
        self._epoch, self._position = "", 0
        self._num_texts = self._num_records = 0
        self._batch: list[Record] = []
        self._batch_bytes = 0

    def write(self, tokens: Int32Array, num_prompt_tokens: int = 0) -> None:
        """Hands over a text, or keeps it until :meth:`flush` if it is short.

        Args:
            tokens: int32 ``[n]``.
            num_prompt_tokens: how many of the first ones are prompt.

        Raises:
            StoreError: the store refuses, or has not answered for a minute.
        """
        self._num_texts += 1
        sequence = f"{self._origin}-{self._num_texts}"
        for record in records_of(
            self._origin,
            self._num_records + 1,
            time.time(),
            self._namespace,
            sequence,
            0,
            tokens,
            num_prompt_tokens,
            final=True,
        ):
            self._num_records = record.number
            self._batch.append(record)
            self._batch_bytes += record.num_bytes
            if self._batch_bytes >= BATCH_BYTES:
                self.flush()

    def flush(self) -> None:
        """Hands over what was kept; raises as :meth:`write`."""
        if not self._batch:
            return
        deadline = time.monotonic() + _PATIENCE_S
        while not self._exchange():
            if time.monotonic() > deadline:
                raise StoreError(f"the draft memory has not answered for {_PATIENCE_S:g} s")
            time.sleep(_REST_S)
        self.num_tokens += sum(record.num_tokens for record in self._batch)
        self._batch, self._batch_bytes = [], 0

    def _exchange(self) -> bool:
        """Whether the store has answered; it takes a record once, however often it is sent."""
        request = ExchangeRequest(
            self._fingerprint, self._origin, self._epoch, self._position, self._batch, max_bytes=0
        )
        try:
            reply = self._client.exchange(request, _CALL_S)
        except StoreError:
            return False
        if reply.refused:
            raise StoreError(reply.refused)
        self._epoch, self._position = reply.epoch, reply.position
        return True
