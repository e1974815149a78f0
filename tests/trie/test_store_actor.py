"""A replica's calls to the store's actor, with a fake actor."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray
from ray.exceptions import GetTimeoutError

from specserve.core.errors import StoreError
from specserve.trie import store_actor
from specserve.trie.records import ExchangeReply
from specserve.trie.store import StoreOptions
from specserve.trie.store_actor import NAMESPACE, RayStoreClient, get_or_start
from tests.trie.texts import FINGERPRINT, call

OPTIONS = StoreOptions(fingerprint=FINGERPRINT, vocab_size=9, resources={"stores": 1.0})
SLOW = GetTimeoutError("slow")


def test_a_store_reserves_what_its_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def start(**options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(remote=lambda options: options)

    monkeypatch.setattr(store_actor, "_ACTOR", SimpleNamespace(options=start))
    assert get_or_start(OPTIONS) is OPTIONS
    assert asked == [
        {
            "name": OPTIONS.name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "resources": {"stores": 1.0},
        }
    ]


def test_a_store_that_hangs_gets_no_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = ExchangeReply("epoch", position=7)
    # The first call is late twice. Its late answer is dropped, and the second call is answered.
    answers: Iterator[Exception | bytes] = iter(
        [SLOW, SLOW, b"late", msgspec.msgpack.encode(reply), b"unreadable"]
    )
    calls: list[bytes] = []

    def exchange(request: bytes) -> int:
        calls.append(request)
        return len(calls)

    def get(number: int, timeout: float) -> bytes:
        assert number == len(calls)
        assert 0 <= timeout <= 1.0
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    client = RayStoreClient(OPTIONS)
    actor = SimpleNamespace(exchange_encoded=SimpleNamespace(remote=exchange))
    monkeypatch.setattr(client, "_store", lambda: actor)
    for _ in range(2):
        with pytest.raises(StoreError, match="no answer within 1 s"):
            client.exchange(call(), 1.0)
    assert len(calls) == 1
    assert client.exchange(call(), 1.0) == reply
    assert len(calls) == 2
    assert client.exchange(call(), 1.0).refused.startswith("cannot read the store's reply")
    assert len(calls) == 3
