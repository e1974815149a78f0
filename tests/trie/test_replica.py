from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specserve.trie import replica as module
from specserve.trie.namespaces import namespace, tenant_half
from specserve.trie.records import ExchangeReply, ExchangeRequest, Record, TextPiece
from specserve.trie.replica import ALONE_FACTOR, ReplicaOptions, TrieReplica
from specserve.trie.store import StoreOptions, TrieStore
from tests.integration.cluster import eventually
from tests.trie.texts import FINGERPRINT, VOCAB_SIZE, DirectClient

WAIT_S = 30.0
OPTIONS = ReplicaOptions(interval_s=0.01)

Texts = dict[tuple[str, str], dict[int, int]]
"""Tokens by position, for each namespace and sequence."""


class Reader:
    """Keeps what a replica reads; fails if it reads a record twice."""

    def __init__(self) -> None:
        self.texts: Texts = {}
        self.tombstones: list[Record] = []
        self._seen: set[tuple[str, int]] = set()

    def __call__(self, record: Record) -> None:
        assert (record.origin, record.number) not in self._seen
        self._seen.add((record.origin, record.number))
        if record.kind != "text":
            self.tombstones.append(record)
        text = self.texts.setdefault((record.namespace, record.sequence), {})
        for offset, token in enumerate(record.token_array().tolist()):
            assert record.start + offset not in text
            text[record.start + offset] = token


class Replica:
    """A replica with the texts that it wrote and read."""

    def __init__(self, client: DirectClient, options: ReplicaOptions = OPTIONS) -> None:
        self.read = Reader()
        self.wrote: Texts = {}
        self.link = TrieReplica(client, self.read, options)

    def write(self, sequence: str, tokens: list[int], namespace: str = "tenant") -> None:
        text = self.wrote.setdefault((namespace, sequence), {})
        start = len(text)
        array = np.array(tokens, dtype=np.int32)
        self.link.publish(TextPiece(namespace, sequence, start, array))
        text |= {start + offset: token for offset, token in enumerate(tokens)}


def new_store(snapshot_url: str = "") -> TrieStore:
    return TrieStore(
        StoreOptions(fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE, snapshot_url=snapshot_url)
    )


@pytest.fixture
def client() -> DirectClient:
    return DirectClient(new_store())


@pytest.fixture
def start(client: DirectClient) -> Iterator[Callable[[], Replica]]:
    started: list[Replica] = []

    def start() -> Replica:
        replica = Replica(client)
        replica.link.start()
        started.append(replica)
        return replica

    yield start
    for replica in started:
        assert not replica.link.apply_errors
        replica.link.stop()


Start = Callable[[], Replica]


def test_replicas_read_what_others_write(start: Start) -> None:
    first, second = start(), start()
    first.write("a", [1, 2, 3])
    second.write("b", [4], namespace="other")
    first.write("a", [5])
    eventually(lambda: second.read.texts == first.wrote, "first's text", WAIT_S, 0.01)
    eventually(lambda: first.read.texts == second.wrote, "second's text", WAIT_S, 0.01)
    third = start()
    both = first.wrote | second.wrote
    eventually(lambda: third.read.texts == both, "both texts", WAIT_S, 0.01)
    assert (second.link.up, second.link.received_tokens) == (True, 4)


def test_a_lone_replica_calls_the_store_less_often(client: DirectClient) -> None:
    first, second = Replica(client), Replica(client)
    assert first.link.take_turn() == pytest.approx(ALONE_FACTOR * OPTIONS.interval_s)
    assert second.link.take_turn() == first.link.take_turn() == OPTIONS.interval_s


def test_stop_sends_the_unsent_text(client: DirectClient, start: Start) -> None:
    slow = Replica(
        client,
        ReplicaOptions(interval_s=3600),
    )
    slow.link.start()
    eventually(lambda: slow.link.up, "the first answer", WAIT_S, 0.01)
    slow.write("a", [1, 2, 3])
    assert slow.link.stop()
    reader = start()
    eventually(lambda: reader.read.texts == slow.wrote, "the unsent text", WAIT_S, 0.01)


def test_stop_returns_without_a_store(start: Start, client: DirectClient) -> None:
    client.store = None
    replica = start()
    replica.write("a", [1])
    began = time.monotonic()
    assert not replica.link.stop(timeout_s=1.0)
    assert time.monotonic() - began < WAIT_S


def test_text_waits_until_there_is_a_store(
    start: Start, client: DirectClient, caplog: pytest.LogCaptureFixture
) -> None:
    store, client.store = client.store, None
    writer, reader = start(), start()
    writer.write("a", [1, 2, 3])
    eventually(lambda: caplog.text.count("does not answer") == 2, "warnings", WAIT_S, 0.01)
    assert (writer.link.up, writer.link.dropped_tokens) == (False, 0)
    assert writer.link.unsent_s > 0
    client.store = store
    eventually(lambda: reader.read.texts == writer.wrote, "the text", WAIT_S, 0.01)
    eventually(lambda: writer.link.unsent_s == 0, "nothing left", WAIT_S, 0.01)
    eventually(lambda: caplog.text.count("answers again") == 2, "log lines", WAIT_S, 0.01)
    assert caplog.text.count("does not answer") == 2


def test_without_a_store_memory_is_bounded_and_drops_are_counted() -> None:
    options = ReplicaOptions(max_bytes=1 << 16)
    client = DirectClient()
    replica = Replica(client, options)
    for number in range(100):
        replica.write(f"{number}", [1] * 500)
        replica.link.take_turn()
    client.store = new_store()
    while replica.link.take_turn() == 0:
        pass
    kept = client.store.stats().num_tokens
    assert 0 < kept < 1 << 14
    assert replica.link.dropped_tokens == 100 * 500 - kept


def test_text_is_dropped_if_the_links_thread_is_too_slow(
    client: DirectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 1)
    link = TrieReplica(client, Reader(), OPTIONS)
    tokens = np.arange(6, dtype=np.int32)
    link.publish(TextPiece("tenant", "a", 0, tokens))
    link.publish(TextPiece("tenant", "a", 6, tokens))
    assert link.dropped_tokens == 6
    link.take_turn()
    link.publish(TextPiece("tenant", "a", 12, tokens))
    assert link.dropped_tokens == 6


def test_a_refused_replica_logs_once_and_calls_rarely(
    client: DirectClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = ExchangeReply(epoch="", refused="its version may be another one")
    replica = Replica(client)
    replica.write("a", [1])
    with monkeypatch.context() as patched:
        patched.setattr(client, "exchange", lambda request, timeout_s: refusal)
        rests_s = [replica.link.take_turn() for _ in range(3)]
    assert min(rests_s) > 10
    assert (replica.link.refused, replica.link.up) == (refusal.refused, False)
    assert [each.name for each in caplog.records].count("specserve.trie.replica") == 1
    replica.link.take_turn()
    assert (replica.link.refused, replica.link.up) == ("", True)
    assert client.store is not None
    assert client.store.stats().num_tokens == 1


def test_a_record_that_cannot_be_applied_is_counted_and_skipped(
    client: DirectClient,
) -> None:
    writer = Replica(client)
    writer.write("bad", [1])
    writer.write("good", [2])
    writer.link.take_turn()
    got: list[str] = []

    def apply(record: Record) -> None:
        if record.sequence == "bad":
            raise RuntimeError("no")
        got.append(record.sequence)

    reader = TrieReplica(client, apply, OPTIONS)
    reader.take_turn()
    assert got == ["good"]
    assert reader.apply_errors == 1


def test_a_purge_reaches_every_replica(client: DirectClient, start: Start) -> None:
    first, second = start(), start()
    first.write("a", [1])
    eventually(lambda: second.read.texts, "the text", WAIT_S, 0.01)
    assert client.store is not None
    client.store.purge("tenant")
    eventually(
        lambda: first.read.tombstones and second.read.tombstones, "the tombstone", WAIT_S, 0.01
    )


def test_a_store_that_lost_its_log_gets_it_back_without_purged_text(
    client: DirectClient,
) -> None:
    writer, reader = Replica(client), Replica(client)
    writer.write("a", [1, 2])
    writer.write("b", [3, 4], namespace="purged")
    writer.link.take_turn()
    reader.link.take_turn()
    assert client.store is not None
    client.store.purge("purged")
    writer.link.take_turn()  # the reader has not seen the purge
    client.store = new_store()
    for each in (reader, writer, reader, reader):
        while each.link.take_turn() == 0:
            pass
    assert client.store.stats().tokens_by_namespace == {"tenant": 2}
    assert [each.namespace for each in reader.read.tombstones] == ["purged"]


def test_a_replica_that_missed_a_purge_brings_no_text_back(
    client: DirectClient,
) -> None:
    ours, adapters, others = (
        namespace("m", tenant="a"),
        namespace("m", "sql", "a"),
        namespace("m", tenant="b"),
    )
    writer, reader = Replica(client), Replica(client)
    for name in (ours, others):
        writer.write("sent", [1, 2], name)
    writer.link.take_turn()
    reader.link.take_turn()
    writer.write("not yet sent", [3, 4], adapters)  # the store does not know this namespace
    assert client.store is not None
    assert client.store.purge(tenant_half("a")) == 2
    for store in (client.store, new_store()):  # the second store does not know the purge
        client.store = store
        for each in (reader, writer, reader, reader):
            while each.link.take_turn() == 0:
                pass
        assert store.stats().tokens_by_namespace == {others: 2}
    assert [each.namespace for each in reader.read.tombstones] == [tenant_half("a")]
    writer.write("of later", [5, 6], adapters)
    writer.link.take_turn()
    assert client.store.stats().tokens_by_namespace == {others: 2, adapters: 2}


def test_old_text_does_not_count_as_lag(client: DirectClient) -> None:
    writer = Replica(client)
    writer.write("a", [1])
    writer.link.take_turn()
    reader = Replica(client)
    reader.link.take_turn()
    assert reader.link.receive_lag_s == 0
    writer.write("a", [2])
    written_at = time.time()
    writer.link.take_turn()
    reader.link.take_turn()
    assert reader.link.receive_lag_s > 0
    assert reader.link.receive_lag_s <= time.time() - written_at + 1


def test_text_that_a_restarted_store_gets_again_does_not_count_as_lag(
    client: DirectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    writer, first, second = (Replica(client) for _ in range(3))
    for turn in ("before", "after"):  # the first turn: what came before does not count
        for each in (writer, first, second):
            each.link.take_turn()
        now += 1
        writer.write(turn, [1])
    for each in (writer, first, second):
        each.link.take_turn()
    now += 3600
    client.store = new_store()
    for each in (writer, first, second, first, second, writer):
        each.link.take_turn()
        assert (each.link.unsent_s, each.link.receive_lag_s) == (0, 0)
    assert client.store.stats().num_tokens == first.link.received_tokens == 2


@pytest.mark.parametrize("seed", range(20))
def test_no_text_of_a_living_replica_is_ever_lost(seed: int, tmp_path: Path) -> None:
    """Random writes, turns, lost answers, store restarts with or without a snapshot, deaths."""
    chance = random.Random(seed)
    url = str(tmp_path)
    stores = [new_store(url)]
    client = DirectClient(stores[0])
    replicas = [Replica(client) for _ in range(3)]
    for _ in range(300):
        one = chance.choice(replicas)
        match chance.choices(
            ("write", "turn", "lose", "save", "crash", "wipe", "join", "die"),
            (100, 100, 10, 5, 5, 3, 3, 3),
        )[0]:
            case "write":
                tokens = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(1, 90))]
                one.write(f"{one.link.origin}-{chance.randrange(3)}", tokens)
            case "turn":
                one.link.take_turn()
            case "lose":
                client.loses_answers = True
                one.link.take_turn()
                client.loses_answers = False
            case "save":
                stores[-1].snapshot_now()
            case "crash":
                stores.append(new_store(url))
            case "wipe":
                for file in tmp_path.iterdir():
                    file.unlink()
                stores.append(new_store(url))
            case "join":
                replicas.append(Replica(client))
            case "die" if len(replicas) > 1:
                replicas.remove(one)
        client.store = stores[-1]
    for _ in range(3):  # sent, handed out, and read
        for each in replicas:
            while each.link.take_turn() == 0:
                pass
    fresh = Replica(client)
    while fresh.link.take_turn() == 0:
        pass
    for each in replicas:
        assert fresh.read.texts == each.read.texts | each.wrote
        assert each.link.dropped_tokens == 0
        assert each.link.apply_errors == 0
    for store in stores:
        store.close()


class Gate(DirectClient):
    """A client of a store that answers only while ``open`` is set."""

    def __init__(self) -> None:
        super().__init__(new_store())
        self.open = threading.Event()
        self.open.set()

    def exchange(self, request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        self.open.wait()
        return super().exchange(request, timeout_s)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_closing_replica_sends_what_it_learned_last_unless_the_store_hangs(
    hangs: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_SEND_S", 0.2 if hangs else 60.0)
    client = Gate()
    replica = Replica(client)
    if hangs:
        client.open.clear()
    replica.link.start()
    replica.write("a text", [1] * 40)
    began = time.monotonic()
    replica.link.close()
    assert time.monotonic() - began < 15.0
    assert client.store is not None
    assert client.store.stats().num_tokens == (0 if hangs else 40)
    said = "did not take all that this replica learned last"
    assert (said in caplog.text) == hangs
    client.open.set()
