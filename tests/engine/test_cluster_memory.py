"""A replica's link to a store in this process."""

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
from specserve.trie.records import ExchangeReply, ExchangeRequest, TextPiece
from specserve.trie.store import StoreOptions, TrieStore
from tests.trie.texts import FINGERPRINT, VOCAB_SIZE, DirectClient

PIECE = TextPiece("a tenant", "a text", 0, np.arange(40, dtype=np.int32))


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
def client() -> Iterator[Client]:
    client = Client(StoreOptions(fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE))
    yield client
    client.open.set()


@pytest.fixture
def memory(client: Client) -> ClusterMemory:
    texts = TrieMemory(1 << 22, [PIECE.namespace])
    return ClusterMemory(
        TrieConfig(kind="trie"), texts, FINGERPRINT, VOCAB_SIZE, lambda options: client
    )


def test_a_closing_replica_sends_what_it_learned_last(
    memory: ClusterMemory,
    client: Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_memory, "LAST_SEND_S", 60.0)
    memory.publish(PIECE)
    memory.close()
    assert client.num_tokens() == len(PIECE.tokens)
    assert not caplog.records


def test_a_store_that_hangs_delays_the_close_briefly(
    memory: ClusterMemory,
    client: Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_memory, "LAST_SEND_S", 0.2)
    client.open.clear()
    memory.publish(PIECE)
    began = time.monotonic()
    memory.close()
    assert time.monotonic() - began < 15.0
    assert client.num_tokens() == 0
    assert "did not take all that this replica learned last" in caplog.text
