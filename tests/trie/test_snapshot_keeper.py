from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specserve.core.errors import SnapshotError
from specserve.trie import snapshot_keeper
from specserve.trie.log_snapshot import SnapshotFile
from specserve.trie.snapshot_keeper import MAX_WAITING_SAVES, SnapshotKeeper
from specserve.trie.token_log import LogState, TokenLog
from tests.integration.cluster import eventually
from tests.trie.texts import FINGERPRINT, record

WAIT_S = 30.0


class Kept:
    """A log with a keeper."""

    def __init__(self, path: Path, interval_s: float) -> None:
        self._log = TokenLog(1 << 20)
        self._lock = threading.Lock()
        self.taken_over: list[LogState] = []
        self.file = SnapshotFile(str(path), FINGERPRINT)
        self.keeper = SnapshotKeeper(
            self.file,
            interval_s,
            self.state,
            self.taken_over.append,
        )

    def append(self, number: int) -> None:
        with self._lock:
            self._log.append(record(number))

    def state(self) -> LogState:
        with self._lock:
            return self._log.state()

    def saved(self) -> LogState | None:
        return self.file.load_or_set_aside()


@contextmanager
def kept(path: Path, interval_s: float = 3600.0) -> Iterator[Kept]:
    kept = Kept(path, interval_s)
    kept.keeper.start()
    try:
        yield kept
    finally:
        kept.keeper.stop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "trie.snapshot"


def test_snapshots_are_written_at_intervals_if_the_log_changed(path: Path) -> None:
    with kept(path, interval_s=0.01) as it:
        for number in (1, 2):
            it.append(number)
            eventually(lambda: it.saved() == it.state(), "a snapshot", WAIT_S, 0.01)
    assert it.keeper.stats().num_saved == 2
    assert it.keeper.stats().age_s >= 0


def test_save_now_writes_a_snapshot(path: Path) -> None:
    with kept(path) as it:
        it.append(1)
        assert it.keeper.save_now() == path.stat().st_size
        assert it.saved() == it.state()


def test_stop_writes_a_last_snapshot(path: Path) -> None:
    with kept(path) as it:
        it.append(1)
    assert it.saved() == it.state()
    it.keeper.stop()
    assert it.keeper.stats().num_saved == 1


def test_a_store_starts_while_the_file_system_hangs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_keeper, "START_S", 0.05)
    with kept(path) as first:
        first.append(1)
    late, may_read = Kept(path, 3600.0), threading.Event()
    read = late.file.load_or_set_aside
    monkeypatch.setattr(late.file, "load_or_set_aside", lambda: may_read.wait(WAIT_S) and read())
    late.keeper.start()
    assert not late.taken_over
    may_read.set()
    late.keeper.stop()
    assert late.taken_over == [first.state()]


def test_start_loads_the_existing_snapshot(path: Path) -> None:
    with kept(path) as first:
        first.append(1)
    with kept(path) as second:
        assert second.taken_over == [first.state()]


def test_a_failure_is_counted_and_the_next_attempt_succeeds(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kept(path, interval_s=0.01) as it:
        path.parent.touch()  # a file in place of the folder
        it.append(1)
        eventually(lambda: it.keeper.stats().num_errors > 1, "errors", WAIT_S, 0.01)
        assert "was not written" in it.keeper.stats().last_error
        assert "tried again" in caplog.text
        with pytest.raises(SnapshotError):
            it.keeper.save_now()
        path.parent.unlink()
        eventually(lambda: it.keeper.stats().num_saved, "a snapshot", WAIT_S, 0.01)
        assert it.keeper.stats().last_error == ""
    assert it.saved() == it.state()


def test_a_snapshot_that_cannot_be_read_yet_is_not_overwritten(path: Path) -> None:
    with kept(path) as first:
        first.append(1)
    mounted = path.parent.rename(path.parent.with_name("mounted"))
    path.parent.touch()  # the file system is not mounted
    back = path.parent.with_name("back")
    back.symlink_to(mounted)
    with kept(path, interval_s=0.01) as it:
        it.append(2)
        eventually(lambda: it.keeper.stats().num_errors > 1, "errors", WAIT_S, 0.01)
        back.replace(path.parent)  # atomic: without any folder it would be a first start
        eventually(lambda: it.taken_over, "the snapshot taken over", WAIT_S, 0.01)
        assert it.taken_over == [first.state()]
        eventually(lambda: not it.keeper.stats().last_error, "no error", WAIT_S, 0.01)


def test_a_last_snapshot_is_written_even_if_none_could_be_read_before(path: Path) -> None:
    path.parent.touch()  # a file in place of the folder
    with kept(path) as it:
        it.append(1)
        path.parent.unlink()
    assert it.saved() == it.state()


def test_few_calls_wait_while_the_file_system_hangs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    with kept(path) as log:
        log.append(1)
        monkeypatch.setattr(log.file, "save", lambda *_: goes_on.wait(WAIT_S))
        asking = [threading.Thread(target=log.keeper.save_now) for _ in range(MAX_WAITING_SAVES)]
        for thread in asking:
            thread.start()
        eventually(lambda: log.keeper._asking._value == 0, "all of them wait", WAIT_S)
        with pytest.raises(SnapshotError, match="4 calls wait for a snapshot already"):
            log.keeper.save_now()
        goes_on.set()
        for thread in asking:
            thread.join(WAIT_S)
        assert log.keeper.save_now()
