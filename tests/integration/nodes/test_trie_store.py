"""Faults of the cluster's draft memory, with real Ray and real processes that are killed."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from specserve.trie.log_snapshot import SnapshotFile
from specserve.trie.store import StoreOptions
from tests.integration.cluster import Cluster, eventually, running_cluster, suspend
from tests.integration.trie_host import VOCAB_SIZE, TrieHost

pytestmark = pytest.mark.timeout(600)

WAIT_S = 60.0
numbers = count()


@pytest.fixture(scope="module")
def cluster(faults: Cluster) -> Cluster:
    return faults


@pytest.fixture(scope="module")
def hosts(cluster: Cluster) -> Iterator[list[TrieHost]]:
    """Two processes with links, and a third one that a test kills."""
    hosts = [TrieHost(cluster) for _ in range(3)]
    yield hosts
    for host in hosts:
        host.stop()


@dataclass
class Replica:
    """A replica's link in one of the hosts."""

    name: str
    host: TrieHost

    def __call__(self, command: str, *args: Any) -> Any:
        return self.host(command, self.name, *args)

    def reads(self, texts: dict[str, int]) -> None:
        """Waits until the replica has received all of these texts."""

        def all_there() -> bool:
            read = self("read")
            return all(read.get(sequence, 0) >= size for sequence, size in texts.items())

        eventually(all_there, lambda: f"{texts}; there: {self('read')}, {self('link')}", WAIT_S)
        assert self("link")["apply_errors"] == 0

    def awaits(self, what: Callable[[dict[str, Any]], bool]) -> None:
        """Waits until the attributes of its link satisfy a condition."""
        eventually(lambda: what(self("link")), lambda: str(self("link")), WAIT_S)


class Memory:
    """One draft memory, for one test.

    Args:
        cluster: the cluster in which it runs.
        hosts: the processes in which its replicas run.
        folder: folder of its snapshots. None: it keeps no snapshots.
    """

    def __init__(self, cluster: Cluster, hosts: list[TrieHost], folder: Path | None) -> None:
        self._cluster = cluster
        self._hosts = hosts
        self.fingerprint = f"model-{next(numbers)}"
        self.options: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "snapshot_url": str(folder or ""),
            "snapshot_interval_s": 3600.0,
        }
        self._replicas: list[Replica] = []
        self._before = {process.pid for process in cluster.processes("TrieStore")}
        options = StoreOptions(vocab_size=VOCAB_SIZE, **self.options)
        self.name, self.file = options.name, Path(options.snapshot_file)

    def replica(self, host: int = 0) -> Replica:
        replica = Replica(f"replica-{next(numbers)}", self._hosts[host])
        assert replica("start", self.options) is None
        self._replicas.append(replica)
        return replica

    def process(self) -> psutil.Process:
        """The store's process."""

        def find() -> psutil.Process | None:
            found = [
                process
                for process in self._cluster.processes("TrieStore")
                if process.pid not in self._before
            ]
            assert len(found) < 2
            return found[0] if found else None

        return eventually(find, "the store's process", WAIT_S)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends the store's process. Ray starts another one."""
        process = self.process()
        self._before.add(process.pid)
        process.send_signal(how)
        process.wait(WAIT_S)

    def log(self) -> str:
        """The logs of the stores of this cluster."""
        logs = (self._cluster.folder / "session_latest/logs").glob("worker-*.err")
        return "".join(log.read_text() for log in logs)

    def ask(self, question: str, *args: Any) -> Any:
        """Calls the store as an operator does."""
        return self._hosts[0]("ask", self.name, question, *args)

    def close(self) -> None:
        for replica in self._replicas:
            if replica.host in self._hosts:
                replica("stop")
        self.ask("stop")


Start = Callable[..., Memory]


def is_past(epoch: str, received_tokens: int) -> Callable[[dict[str, Any]], bool]:
    """Whether a link uses a restarted store and has received more than so many tokens."""
    return lambda link: (
        link["up"] and link["epoch"] != epoch and link["received_tokens"] > received_tokens
    )


@pytest.fixture
def start(cluster: Cluster, hosts: list[TrieHost]) -> Iterator[Start]:
    started: list[Memory] = []

    def start(folder: Path | None = None) -> Memory:
        started.append(Memory(cluster, hosts, folder))
        return started[-1]

    yield start
    for memory in started:
        memory.close()


def test_replicas_that_start_together_share_one_store_and_its_text(start: Start) -> None:
    memory = start()
    replicas = [memory.replica(host) for host in (0, 1, 2)]
    for number, replica in enumerate(replicas):
        replica("write", f"text-{number}", 100 * (number + 1))
    for number, replica in enumerate(replicas):
        others = {f"text-{n}": 100 * (n + 1) for n in range(3) if n != number}
        replica.reads(others)
        assert f"text-{number}" not in replica("read")
    assert len({replica("link")["epoch"] for replica in replicas}) == 1
    stats = memory.ask("stats")
    assert (stats["num_replicas"], stats["num_tokens"]) == (3, 600)


@pytest.mark.parametrize("kept", [False, True], ids=["no snapshot", "a snapshot"])
def test_a_store_killed_under_load_recovers_all_text_from_living_replicas(
    start: Start, tmp_path: Path, kept: bool
) -> None:
    memory = start(tmp_path if kept else None)
    one, two = memory.replica(0), memory.replica(1)
    one("begin", "a", "b")
    two("begin", "c")
    one.awaits(lambda link: link["received_tokens"] > 100)
    if kept:
        assert memory.ask("snapshot_now") > 0
    for _ in range(2):
        epoch, read = one("link")["epoch"], one("link")["received_tokens"]
        memory.kill()
        one.awaits(is_past(epoch, read + 1000))
    wrote = one("end") | two("end")
    third = memory.replica(0)
    third.reads(wrote)
    assert memory.ask("stats")["num_tokens"] == sum(wrote.values())
    for replica in (one, two):
        replica.awaits(lambda link: link["unsent_s"] == 0)
        assert replica("link")["dropped_tokens"] == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_text_of_stopped_replicas_is_restored_from_the_snapshot(
    start: Start, tmp_path: Path, how: signal.Signals
) -> None:
    memory = start(tmp_path)
    writer = memory.replica(0)
    writer("write", "a", 500)
    reader = memory.replica(1)
    reader.reads({"a": 500})
    if how == signal.SIGKILL:  # SIGKILL leaves no time for a last snapshot
        assert memory.ask("snapshot_now") > 0
    writer.awaits(lambda link: link["up"] and link["unsent_s"] == 0)
    for replica in (writer, reader):
        assert replica("stop")
    memory.kill(how)
    fresh = memory.replica(1)
    fresh.reads({"a": 500})
    assert memory.ask("stats")["num_tokens"] == 500


def test_text_of_a_killed_replica_is_still_served(
    start: Start, cluster: Cluster, hosts: list[TrieHost]
) -> None:
    memory = start()
    survivor, victim = memory.replica(0), memory.replica(2)
    victim("write", "a", 300)
    survivor.reads({"a": 300})
    hosts.pop().kill()
    survivor("write", "b", 10)
    memory.replica(1).reads({"a": 300, "b": 10})
    memory.kill()  # the new store gets the text from the survivor
    memory.replica(1).reads({"a": 300, "b": 10})
    hosts.append(TrieHost(cluster))


def test_replicas_go_on_while_the_store_hangs_and_catch_up_later(start: Start) -> None:
    memory = start()
    one, two = memory.replica(0), memory.replica(1)
    one("write", "a", 10)
    two.reads({"a": 10})
    process = memory.process()
    suspend(process)
    try:
        one("begin", "b")
        one.awaits(lambda link: not link["up"] and link["unsent_s"] > 0)
    finally:
        process.resume()
    one.awaits(lambda link: link["up"])
    two.reads(one("end"))
    assert one("link")["dropped_tokens"] == 0


def test_a_damaged_snapshot_is_set_aside_and_the_memory_starts_empty(
    start: Start, tmp_path: Path
) -> None:
    memory = start(tmp_path)
    memory.file.write_bytes(bytes(1000))
    one, two = memory.replica(0), memory.replica(1)
    one("write", "a", 100)
    two.reads({"a": 100})
    aside = Path(f"{memory.file}.refused-1")
    assert aside.read_bytes() == bytes(1000)
    assert f"Snapshot {memory.file} cannot be used" in memory.log()
    assert str(aside) in memory.log()
    assert memory.ask("snapshot_now") > 100
    memory.kill()
    memory.replica(1).reads({"a": 100})


def test_a_full_disk_fails_the_new_snapshot_and_keeps_the_old_one(
    start: Start, tmp_path: Path
) -> None:
    memory = start(tmp_path)
    one, two = memory.replica(0), memory.replica(1)
    one("write", "a", 100)
    two.reads({"a": 100})
    assert memory.ask("snapshot_now") > 0
    before = memory.file.read_bytes()
    # A limit on the file size: writing fails in the same way as on a full disk.
    limit = len(before) + 1000
    memory.process().rlimit(psutil.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    one("write", "b", 4000)
    two.reads({"b": 4000})
    assert memory.ask("snapshot_now").startswith("SnapshotError: snapshot")
    assert memory.file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [memory.file]
    one("write", "c", 10)
    two.reads({"c": 10})
    stats = memory.ask("stats")["snapshot"]
    assert (stats["num_errors"], stats["num_saved"]) == (1, 1)
    memory.process().rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memory.ask("snapshot_now") > len(before)


def test_unordered_repeated_and_out_of_vocabulary_records_do_no_harm(start: Start) -> None:
    memory = start()
    one = memory.replica(0)
    one("send", [{"number": 3, "tokens": [1]}, {"number": 1, "tokens": [2, 3]}])
    one("send", [{"number": 3, "tokens": [1]}, {"number": 2, "tokens": [VOCAB_SIZE]}])
    one("send", [{"number": 4, "tokens": [-1]}, {"number": 5, "tokens": [4]}])
    one("write", "a", 10)
    memory.replica(1).reads({"a": 10})
    stats = memory.ask("stats")
    assert (stats["num_tokens"], stats["num_records"]) == (14, 4)


def test_a_purge_reaches_the_replicas_and_survives_a_restart(start: Start, tmp_path: Path) -> None:
    memory = start(tmp_path)
    one, two = memory.replica(0), memory.replica(1)
    one("write", "a", 10)
    two.reads({"a": 10})
    assert memory.ask("purge", "tenant") == 10
    memory.kill()
    one("write", "b", 10)
    fresh = memory.replica(1)
    fresh.reads({"b": 10})
    assert "a" not in fresh("read")
    assert memory.ask("purge", "").startswith("ConfigError: purge")


def test_a_stopped_store_has_written_its_snapshot(start: Start, tmp_path: Path) -> None:
    memory = start(tmp_path)
    one = memory.replica(0)
    one("write", "a", 10)
    one.awaits(lambda link: link["up"] and link["unsent_s"] == 0)
    assert memory.name in one.host("stores")
    assert one("stop")
    memory.ask("stop")
    eventually(lambda: memory.name not in one.host("stores"), "it is gone", WAIT_S)
    assert "runs; running: " in memory.ask("stats")
    memory.replica(1).reads({"a": 10})


def test_a_store_that_cannot_write_its_last_snapshot_runs_on(start: Start, tmp_path: Path) -> None:
    memory = start(tmp_path)
    one = memory.replica(0)
    one("write", "a", 10)
    one.awaits(lambda link: link["up"] and link["unsent_s"] == 0)
    in_the_way = Path(f"{memory.file}.new")
    in_the_way.mkdir(parents=True)
    assert "was not written: Is a directory" in memory.ask("stop")
    assert memory.name in one.host("stores")
    in_the_way.rmdir()
    assert memory.ask("stop") is None
    assert memory.file.exists()


def test_a_store_writes_a_last_snapshot_when_its_node_stops(tmp_path: Path) -> None:
    with running_cluster(1) as cluster:
        host = TrieHost(cluster)
        try:
            memory = Memory(cluster, [host], tmp_path)
            one = memory.replica()
            one("write", "a", 10)
            one.awaits(lambda link: link["up"] and link["unsent_s"] == 0)
            assert not memory.file.exists()
        finally:
            host.stop()
    loaded = SnapshotFile(str(memory.file), memory.fingerprint).load_or_set_aside()
    assert loaded is not None
    assert sum(record.num_tokens for record in loaded.records) == 10
