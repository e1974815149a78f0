from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import ray
from msgspec.structs import replace
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError, RpcError

from specserve.core.errors import ConfigError, SnapshotError, StoreError
from specserve.trie.log_snapshot import SnapshotFile
from specserve.trie.namespaces import namespace, tenant_half
from specserve.trie.records import MAX_AHEAD_S, ExchangeReply, Record
from specserve.trie.store import StoreOptions, TrieStore
from specserve.trie.store_actor import RayStoreClient, RemoteStore, TrieStoreActor, list_stores
from tests.trie.texts import FINGERPRINT, VOCAB_SIZE, call, record


@pytest.fixture
def options(tmp_path: Path) -> StoreOptions:
    return StoreOptions(
        fingerprint=FINGERPRINT,
        vocab_size=VOCAB_SIZE,
        max_bytes=1 << 20,
        snapshot_url=str(tmp_path),
        snapshot_interval_s=3600.0,
    )


@pytest.fixture
def store(options: StoreOptions) -> Iterator[TrieStore]:
    store = TrieStore(options)
    yield store
    store.close()


def read(store: TrieStore, reply: ExchangeReply | None = None) -> tuple[list[Record], int]:
    """All records that a reader has not read, and its new position."""
    records: list[Record] = []
    epoch, position = (reply.epoch, reply.position) if reply is not None else ("", 0)
    while True:
        answer = store.exchange(call(epoch=epoch, position=position, max_bytes=500))
        records += answer.records
        epoch, position = answer.epoch, answer.position
        if not answer.behind:
            return records, position


def test_a_replica_gets_records_of_others_only(store: TrieStore) -> None:
    store.exchange(call([record(1), record(2)], origin="replica"))
    reply = store.exchange(call([record(1, origin="reader")]))
    assert reply.records == [record(1), record(2)]
    again = store.exchange(call(epoch=reply.epoch, position=reply.position))
    assert again.records == []
    other, _ = read(store)
    assert other == [record(1), record(2)]


def test_a_caller_without_the_epoch_gets_the_held_numbers(
    store: TrieStore,
) -> None:
    first = store.exchange(call([record(1), record(2), record(4)], origin="replica"))
    assert first.held == {"replica": [(1, 2), (4, 4)]}
    again = store.exchange(call(origin="replica", epoch=first.epoch, position=first.position))
    assert (again.epoch, again.held) == (first.epoch, {})


@pytest.mark.parametrize(
    "encoded",
    [
        msgspec.msgpack.encode(("the model", *msgspec.structs.astuple(call([record(1)])))),
        msgspec.msgpack.encode(msgspec.structs.astuple(call([record(1)]))[1:]),
        b"",
    ],
    ids=["a field more", "a field less", "garbage"],
)
def test_a_call_of_another_version_is_refused(store: TrieStore, encoded: bytes) -> None:
    actor: Any = store
    answer = TrieStoreActor.exchange_encoded(actor, encoded)
    reply = msgspec.msgpack.decode(answer, type=ExchangeReply)
    assert reply.refused.startswith("cannot read the replica's call; its version may be another")
    assert (reply.records, store.stats().num_records) == ([], 0)


def test_bad_and_repeated_records_are_dropped(store: TrieStore) -> None:
    records = [record(3), record(1), record(1), record(2, [VOCAB_SIZE]), record(4, [-1])]
    assert store.exchange(call(records, origin="replica")).refused == ""
    assert store.stats().num_records == 2


def test_a_restarted_store_continues_from_its_snapshot(options: StoreOptions) -> None:
    first = TrieStore(options)
    first.exchange(call([record(1), record(2)], origin="replica"))
    first.close()
    second = TrieStore(options)
    assert second.epoch != first.epoch
    assert second.stats().num_tokens == 6
    reply = second.exchange(call([record(1), record(3)], origin="replica"))
    assert reply.held == {"replica": [(1, 3)]}
    assert read(second)[0] == [record(1), record(2), record(3)]
    second.close()


def test_records_of_a_snapshot_are_checked_like_received_ones(options: StoreOptions) -> None:
    first = TrieStore(options)
    first.exchange(call([record(1)], origin="replica"))
    first.close()
    file = SnapshotFile(options.snapshot_file, FINGERPRINT)
    state = file.load_or_set_aside()
    assert state is not None
    unknown = replace(record(2), tokens=np.array([VOCAB_SIZE], "<i4").tobytes())
    file.save(replace(state, records=[*state.records, unknown]))
    second = TrieStore(options)
    assert read(second)[0] == [record(1)]
    second.close()


def test_a_text_from_the_future_is_dropped_with_a_warning(
    store: TrieStore, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = replace(record(1), stamp=time.time() + 2 * MAX_AHEAD_S)
    store.exchange(call([ahead, record(2)], origin="replica"))
    assert read(store)[0] == [record(2)]
    assert "its stamp is in the future: compare the nodes' clocks" in caplog.text


def test_a_store_with_a_slow_clock_takes_its_snapshot_over(
    options: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = TrieStore(options)
    first.exchange(call([replace(record(1), stamp=time.time())], origin="replica"))
    first.close()
    slow = time.time() - 2 * MAX_AHEAD_S
    monkeypatch.setattr(time, "time", lambda: slow)
    second = TrieStore(options)
    assert [each.number for each in read(second)[0]] == [1]
    second.close()


def test_a_reader_of_a_former_store_starts_over_and_misses_nothing(
    options: StoreOptions,
) -> None:
    first = TrieStore(options)
    first.exchange(call([record(1)], origin="replica"))
    first.snapshot_now()
    first.exchange(call([record(2)], origin="replica"))
    _, position = read(first)
    second = TrieStore(options)  # the first store has crashed
    second.exchange(call([record(7)], origin="another"))
    reply = second.exchange(call(epoch=first.epoch, position=position))
    assert [each.number for each in reply.records] == [1, 7]
    first.close()
    second.close()


def test_readers_start_over_at_a_store_without_a_snapshot(options: StoreOptions) -> None:
    old = ExchangeReply(epoch="some other", position=17)
    store = TrieStore(StoreOptions(fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE))
    store.exchange(call([record(1)], origin="replica"))
    assert read(store, old)[0] == [record(1)]
    assert store.snapshot_now() == 0
    store.close()


def test_a_purge_applies_to_readers_the_snapshot_and_late_records(options: StoreOptions) -> None:
    store = TrieStore(options)
    now = time.time()
    store.exchange(
        call([record(1, stamp=now + 60), record(2, namespace="other")], origin="replica")
    )
    before = store.exchange(call())
    assert store.purge("tenant") == 3
    store.exchange(call([record(3, stamp=now + 60)], origin="replica"))
    (tombstone,) = read(store, before)[0]
    assert (tombstone.kind, tombstone.namespace) == ("purge", "tenant")
    loaded = SnapshotFile(options.snapshot_file, FINGERPRINT).load_or_set_aside()
    assert loaded is not None
    assert [each.namespace for each in loaded.records if each.num_tokens] == ["other"]
    store.close()


def test_a_purge_of_a_tenant_applies_to_namespaces_without_records(
    options: StoreOptions,
) -> None:
    store = TrieStore(options)
    plain, other = namespace("m", tenant="a"), namespace("m", tenant="b")
    store.exchange(call([record(1, namespace=plain, stamp=time.time() + 60)], origin="replica"))
    assert store.purge(tenant_half("a")) == 3
    store.close()
    again = TrieStore(options)  # from the snapshot
    now = time.time()
    resent = [
        record(number, namespace=name, stamp=now)
        for number, name in enumerate((plain, namespace("m", "sql", "a"), other), 2)
    ]
    again.exchange(call(resent, origin="replica"))
    assert again.stats().tokens_by_namespace == {other: 3}
    again.close()


def test_a_purge_raises_if_its_snapshot_is_not_written(options: StoreOptions) -> None:
    store = TrieStore(options)
    store.exchange(call([record(1)], origin="replica"))
    folder = Path(options.snapshot_url)
    folder.rmdir()
    folder.touch()  # the folder cannot be created again
    with pytest.raises(SnapshotError, match="was not written"):
        store.purge("tenant")
    assert store.stats().num_tokens == 0
    store.close()


def test_text_stamped_by_a_fast_clock_can_be_purged(
    store: TrieStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: now + 7200)
        store.exchange(call([record(1, stamp=now + 7200)], origin="replica"))
    assert store.purge("tenant") == 3
    store.exchange(call([record(2, stamp=now + 60)], origin="replica"))
    assert store.stats().num_tokens == 0


def test_a_purge_covers_the_rest_of_the_texts_that_began_before_it(store: TrieStore) -> None:
    began = time.time() - 1
    store.exchange(call([record(1, stamp=began, began=began)], origin="replica"))
    store.purge("tenant")
    later = time.time()
    rest = record(2, stamp=later, began=began), record(3, stamp=later, began=later)
    store.exchange(call([*rest], origin="replica"))
    assert store.stats().num_records == 2  # the purge, and the text that began after it


@pytest.mark.parametrize("namespace", ["", "n" * 200])
def test_a_purge_of_an_invalid_namespace_is_refused(store: TrieStore, namespace: str) -> None:
    with pytest.raises(ConfigError, match="purge"):
        store.purge(namespace)


def test_stats_count_the_held_tokens(store: TrieStore) -> None:
    store.exchange(call([record(1), record(2, namespace="other")], origin="replica"))
    store.exchange(call())
    stats = store.stats()
    assert stats.tokens_by_namespace == {"tenant": 3, "other": 3}
    assert (stats.num_replicas, stats.num_tokens) == (2, 6)
    assert 0 < stats.num_bytes < stats.max_bytes


def test_each_model_has_its_own_name_and_snapshot() -> None:
    kinds = [
        StoreOptions(fingerprint=fingerprint, vocab_size=9, snapshot_url="s3://b/f/")
        for fingerprint in ("a", "b")
    ]
    assert len({each.name for each in kinds}) == 2
    assert [each.snapshot_file for each in kinds] == [f"s3://b/f/{k.name}.snapshot" for k in kinds]


def test_an_unusable_url_is_refused_before_a_store_is_started() -> None:
    options = StoreOptions(fingerprint=FINGERPRINT, vocab_size=9, snapshot_url="no://where")
    with pytest.raises(ConfigError, match="snapshot_url"):
        RayStoreClient(options)


def unanswered(error: Exception) -> ExchangeReply:
    """The reply of a store whose calls end with this error."""
    client = RayStoreClient(StoreOptions(fingerprint=FINGERPRINT, vocab_size=9))

    def fail() -> None:
        raise error

    vars(client)["_store"] = fail
    return client.exchange(call(), 1.0)


def test_a_store_that_does_not_start_is_not_started_again_at_once() -> None:
    cause = RayTaskError("__init__", "Traceback\nConfigError: snapshot_url: no s3fs", ValueError())
    reply = unanswered(ActorDiedError(cause))
    assert reply.refused == "the store does not start: ConfigError: snapshot_url: no s3fs"
    with pytest.raises(StoreError):  # a store that has run: it is started again
        unanswered(ActorDiedError())


@pytest.mark.parametrize("error", [GetTimeoutError("slow"), RpcError("gone")])
def test_a_control_store_that_does_not_answer_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, error: RayError
) -> None:
    def fail(*_: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(ray, "get_actor", fail)
    monkeypatch.setattr(ray.util, "list_named_actors", fail)
    for ask in (list_stores, partial(RemoteStore, "any")):
        with pytest.raises(StoreError, match=type(error).__name__):
            ask()
