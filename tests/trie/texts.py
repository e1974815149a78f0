"""Records and a store's client for tests of the replicated log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from specserve.core.errors import StoreError
from specserve.trie.records import ExchangeReply, ExchangeRequest, Record
from specserve.trie.store import TrieStore

VOCAB_SIZE = 1000
FINGERPRINT = "model@revision/tokenizer"


def pack(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def record(number: int = 1, tokens: Sequence[int] = (1, 2, 3), **fields: Any) -> Record:
    base: dict[str, Any] = {
        "origin": "replica",
        "stamp": 1e9,
        "namespace": "tenant",
        "sequence": "request",
    }
    return Record(**(base | {"number": number, "tokens": pack(tokens)} | fields))


def purge(number: int = 1, **fields: Any) -> Record:
    return record(number, (), kind="purge", sequence="", **({"origin": "operator"} | fields))


def call(records: Sequence[Record] = (), **fields: Any) -> ExchangeRequest:
    base: dict[str, Any] = {
        "origin": "reader",
        "epoch": "",
        "position": 0,
    }
    return ExchangeRequest(**(base | {"records": list(records), "max_bytes": 1 << 20} | fields))


class DirectClient:
    """A client of a store in the same process. ``store`` may be removed and replaced.

    With ``loses_answers`` a call reaches the store, but its answer is lost.
    """

    def __init__(self, store: TrieStore | None = None) -> None:
        self.store = store
        self.loses_answers = False

    def exchange(self, request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        if self.store is None:
            raise StoreError("there is no store")
        encoded = msgspec.msgpack.encode(request)
        reply = self.store.exchange(msgspec.msgpack.decode(encoded, type=ExchangeRequest))
        if self.loses_answers:
            raise StoreError("no answer in time")
        return msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=ExchangeReply)
