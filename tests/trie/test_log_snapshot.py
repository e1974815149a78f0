from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest

from specserve.core.errors import ConfigError, SnapshotError
from specserve.trie import log_snapshot
from specserve.trie.log_snapshot import VERSION, SnapshotFile
from specserve.trie.token_log import LogState, TokenLog
from tests.trie.texts import FINGERPRINT, VOCAB_SIZE, purge, record


def some_state(num_records: int = 500) -> LogState:
    log = TokenLog(1 << 24)
    for number in range(1, num_records + 1):
        log.append(record(number, [number % VOCAB_SIZE], origin=f"replica-{number % 3}"))
    log.append(purge(namespace="gone"))
    return log.state()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "trie.snapshot"


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


def test_a_saved_state_is_loaded_again(path: Path) -> None:
    file = SnapshotFile(str(path), FINGERPRINT)
    size = file.save(some_state())
    assert path.stat().st_size == size
    assert file.load_or_set_aside() == some_state()
    assert os.listdir(path.parent) == [path.name]


def test_only_the_owner_may_read_a_snapshot(path: Path) -> None:
    SnapshotFile(str(path), FINGERPRINT).save(some_state())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_missing_snapshot_is_none_and_logs_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert SnapshotFile(str(path), FINGERPRINT).load_or_set_aside() is None
    assert not caplog.records


def test_a_snapshot_may_be_at_a_url(memory: fsspec.AbstractFileSystem) -> None:
    file = SnapshotFile("memory://bucket/trie.snapshot", FINGERPRINT)
    assert file.load_or_set_aside() is None
    file.save(some_state(3))
    file.save(some_state())
    assert file.load_or_set_aside() == some_state()
    assert SnapshotFile(file.url, "another").load_or_set_aside() is None
    assert [name.rpartition("/")[2] for name in memory.ls("/bucket", detail=False)] == [
        "trie.snapshot.refused-1"
    ]


def test_a_file_system_that_replaces_no_file_is_noticed(
    memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SnapshotFile("memory://bucket/trie.snapshot", FINGERPRINT)
    file.save(some_state())
    monkeypatch.setattr(type(memory), "mv", lambda *_: None)
    with pytest.raises(SnapshotError, match="was not replaced"):
        file.save(some_state(3))


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://bucket/trie",
        pytest.param(
            "s3://bucket/trie",
            marks=pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed"),
        ),
    ],
)
def test_a_url_that_no_installed_package_knows_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="snapshot_url"):
        SnapshotFile(url, FINGERPRINT)


@pytest.mark.parametrize("place", [0, 1, 20, 200, 2000, -40, -8, -1])
def test_one_wrong_byte_is_noticed(
    path: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = SnapshotFile(str(path), FINGERPRINT)
    file.save(some_state())
    content = bytearray(path.read_bytes())
    content[place] ^= 0x41
    path.write_bytes(content)
    assert file.load_or_set_aside() is None
    assert not path.exists()
    assert Path(f"{path}.refused-1").read_bytes() == content
    assert str(path) in caplog.text
    assert f"{path}.refused-1" in caplog.text


def test_a_truncated_or_extended_snapshot_is_refused(path: Path) -> None:
    file = SnapshotFile(str(path), FINGERPRINT)
    file.save(some_state(5))
    content = path.read_bytes()
    for size in (*range(0, len(content), 11), len(content) - 1):
        path.write_bytes(content[:size])
        assert file.load_or_set_aside() is None, size
    path.write_bytes(content + b"x")
    assert file.load_or_set_aside() is None
    path.write_bytes(content)
    assert file.load_or_set_aside() is not None


def test_a_snapshot_of_another_model_is_set_aside(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = SnapshotFile(str(path), FINGERPRINT)
    for number in (1, 2):
        SnapshotFile(str(path), "another").save(some_state())
        assert file.load_or_set_aside() is None
        assert Path(f"{path}.refused-{number}").exists()
    assert f"it is of 'another', this is '{FINGERPRINT}'" in caplog.text


def test_a_snapshot_of_another_version_is_set_aside(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SnapshotFile(str(path), FINGERPRINT)
    with monkeypatch.context() as patch:
        patch.setattr(log_snapshot, "VERSION", VERSION + 1)
        file.save(some_state())
    assert file.load_or_set_aside() is None
    assert f"version {VERSION + 1}" in caplog.text


def test_a_file_that_cannot_be_read_is_set_aside(path: Path) -> None:
    path.mkdir(parents=True)
    assert SnapshotFile(str(path), FINGERPRINT).load_or_set_aside() is None
    assert Path(f"{path}.refused-1").is_dir()


def test_a_snapshot_that_cannot_be_read_now_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SnapshotFile(str(path), FINGERPRINT)
    file.save(some_state())

    def fail(*args: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(file._fs, "open", fail)
        with pytest.raises(SnapshotError, match=r"trie\.snapshot cannot be read: Permission den"):
            file.load_or_set_aside()
    assert os.listdir(path.parent) == [path.name]
    assert file.load_or_set_aside() == some_state()


def test_a_full_disk_leaves_the_old_snapshot_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SnapshotFile(str(path), FINGERPRINT)
    file.save(some_state())

    def is_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", is_full)
        with pytest.raises(SnapshotError, match="No space left on device"):
            file.save(some_state(3))
    assert os.listdir(path.parent) == [path.name]
    assert file.load_or_set_aside() == some_state()


def test_an_impossible_folder_is_a_snapshot_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = SnapshotFile(str(tmp_path / "file" / "trie.snapshot"), FINGERPRINT)
    with pytest.raises(SnapshotError, match=r"trie\.snapshot was not written"):
        file.save(some_state())
    with pytest.raises(SnapshotError, match="cannot be read: Not a directory"):
        file.load_or_set_aside()
