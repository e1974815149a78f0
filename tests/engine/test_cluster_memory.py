"""A replica's links to stores in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from specserve.core.source_config import TrieConfig
from specserve.engine import cluster_memory
from specserve.engine.cluster_memory import ClusterMemory
from specserve.trie.memory import TrieMemory
from specserve.trie.namespaces import shard_of
from specserve.trie.records import ExchangeReply, ExchangeRequest, TextPiece
from specserve.trie.store import StoreOptions, TrieStore
from tests.trie.texts import FINGERPRINT, VOCAB_SIZE, DirectClient

TEXT = np.arange(40, dtype=np.int32)
NAMESPACES = [
    next(name for name in map(str, range(99)) if shard_of(name, 2) == shard) for shard in (0, 1)
]
"""One namespace for each of two stores."""


class Client(DirectClient):
    """A client of a store that answers only while ``open`` is set."""

    def __init__(self, options: StoreOptions) -> None:
        super().__init__(TrieStore(options))
        self.open = threading.Event()
        self.open.set()

    def exchange(self, request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        self.open.wait()
        return super().exchange(request, timeout_s)

    def num_tokens(self) -> int:
        assert self.store is not None
        return self.store.stats().num_tokens


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    """The clients of both stores. The fixture ``memory`` adds them."""
    clients: list[Client] = []
    yield clients
    for client in clients:
        client.open.set()


@pytest.fixture
def memory(clients: list[Client]) -> ClusterMemory:
    """A memory that is connected to two stores."""

    def connect(options: StoreOptions) -> Client:
        clients.append(Client(options))
        return clients[-1]

    config = TrieConfig(kind="trie", num_store_shards=2)
    return ClusterMemory(config, TrieMemory(1 << 22, NAMESPACES), FINGERPRINT, VOCAB_SIZE, connect)


def test_a_closing_replica_sends_what_it_learned_last(
    memory: ClusterMemory,
    clients: list[Client],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_memory, "LAST_SEND_S", 60.0)
    for namespace in NAMESPACES:
        memory.publish(TextPiece(namespace, "a text", 0, TEXT))
    memory.close()
    assert [client.num_tokens() for client in clients] == [len(TEXT), len(TEXT)]
    assert not caplog.records


def test_a_store_that_hangs_delays_the_close_briefly_and_no_other_store(
    memory: ClusterMemory,
    clients: list[Client],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_memory, "LAST_SEND_S", 5.0)  # enough for the other store
    clients[0].open.clear()
    for namespace in NAMESPACES:
        memory.publish(TextPiece(namespace, "a text", 0, TEXT))
    began = time.monotonic()
    memory.close()
    assert time.monotonic() - began < 15.0
    assert [client.num_tokens() for client in clients] == [0, len(TEXT)]
    assert "did not take all that this replica learned last" in caplog.text
