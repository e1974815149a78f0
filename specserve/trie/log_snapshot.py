"""Writes and reads snapshots of a token log.

A snapshot is a gzip file of JSON lines: a :class:`SnapshotHeader`, then one record a line. Gzip
detects a damaged or truncated file.
"""

from __future__ import annotations

import gzip
import logging
import os
import zlib
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError, SnapshotError, reason_of, shorten
from specserve.core.source_config import TrieConfig
from specserve.trie.records import Ranges, Record
from specserve.trie.token_log import LogState

logger = logging.getLogger(__name__)

VERSION = 3

_encode = msgspec.json.Encoder().encode


class SnapshotHeader(msgspec.Struct, frozen=True):
    """The first line: version, model identity, and the log's state without its records."""

    version: int
    fingerprint: str
    held: Ranges


def check_snapshot_urls(config: AppConfig) -> None:
    """Raises ConfigError if fsspec cannot use a configured URL on this machine."""
    for index, source in enumerate(config.speculation):
        if isinstance(source, TrieConfig) and source.snapshot_url:
            try:
                SnapshotFile(source.snapshot_url, "")
            except ConfigError as error:
                field = f"speculation.{index}.{error.field}"
                raise ConfigError(field, error.value, error.allowed) from None


class SnapshotFile:
    """The snapshot at one URL.

    Every error of the file system is raised as a ``SnapshotError``.

    Args:
        url: a path, whose missing folders are created, or a URL that fsspec supports.
        fingerprint: identity of the model and tokenizer that the tokens belong to.

    Raises:
        ConfigError: fsspec does not know the URL's scheme, or lacks a package for it.
    """

    def __init__(self, url: str, fingerprint: str) -> None:
        self.url = url
        self._fingerprint = fingerprint
        try:
            self._fs, path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                "snapshot_url", url, f"a path, or a URL for fsspec: {error}"
            ) from None
        self._path = str(path)
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def save(self, state: LogState) -> int:
        """Writes the snapshot to ``<name>.new``, then renames it over the previous one.

        Returns:
            The file's size in bytes.

        Raises:
            SnapshotError: it could not be written; the previous one is unchanged.
        """
        aside = f"{self._path}.new"
        try:
            if self._is_local:
                Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            size = self._write(aside, state)
            self._move(aside, self._path)
        except Exception as error:  # each file system has errors of its own
            with suppress(Exception):
                self._fs.rm_file(aside)
            raise SnapshotError(f"snapshot {self.url} was not written: {_say(error)}") from error
        return size

    def load_or_set_aside(self) -> LogState | None:
        """Reads the snapshot; renames it to ``<name>.refused-<number>`` if its content is wrong.

        A warning gives the reason.

        Returns:
            The content of the log; None if there is no usable snapshot.

        Raises:
            SnapshotError: the snapshot cannot be read now, or can neither be used nor renamed.
        """
        try:
            with self._fs.open(self._path, "rb") as file:
                return _read(file, self._fingerprint)
        except FileNotFoundError:
            return None
        except (SnapshotError, IsADirectoryError) as error:
            reason = _say(error)
        except Exception as error:  # each file system has errors of its own
            raise SnapshotError(f"snapshot {self.url} cannot be read: {_say(error)}") from error
        try:
            aside = next(
                name
                for name in (f"{self._path}.refused-{number}" for number in count(1))
                if not self._fs.exists(name)
            )
            self._move(self._path, aside)
        except Exception as error:
            raise SnapshotError(
                f"snapshot {self.url} cannot be used ({reason}) nor moved aside: {_say(error)}"
            ) from error
        logger.warning(
            "Snapshot %s cannot be used: %s. It is now %s, and the memory starts empty",
            self.url,
            reason,
            aside,
        )
        return None

    def _write(self, path: str, state: LogState) -> int:
        header = SnapshotHeader(VERSION, self._fingerprint, state.held)
        with self._open_new(path) as file:
            with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as lines:
                for each in (header, *state.records):  # one by one, so that other threads run
                    lines.write(_encode(each) + b"\n")
            size: int = file.tell()
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())
        return size

    def _open_new(self, path: str) -> Any:
        if self._is_local:  # readable for the owner only, because it holds users' text
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        return self._fs.open(path, "wb")

    def _move(self, source: str, target: str) -> None:
        if not self._is_local:
            self._fs.mv(source, target)
            self._fs.invalidate_cache()
            if self._fs.exists(source):  # some file systems replace no file, and do not say so
                raise OSError(f"{target} was not replaced")
            return
        os.replace(source, target)
        folder = os.open(Path(target).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _read(file: BinaryIO, fingerprint: str) -> LogState:
    try:
        with gzip.GzipFile(fileobj=file) as lines:
            header = msgspec.json.decode(lines.readline(), type=SnapshotHeader)
            if header.version != VERSION:
                raise SnapshotError(f"it has version {header.version}, this is version {VERSION}")
            if header.fingerprint != fingerprint:
                raise SnapshotError(
                    f"it is of {shorten(header.fingerprint)}, this is {shorten(fingerprint)}"
                )
            decode = msgspec.json.Decoder(Record).decode
            records = [decode(line) for line in lines]
    except EOFError:
        raise SnapshotError("it is cut off") from None
    except (gzip.BadGzipFile, zlib.error, msgspec.MsgspecError, UnicodeDecodeError):
        raise SnapshotError("it is damaged, or no snapshot of a draft memory") from None
    return LogState(header.held, records)


def _say(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return reason_of(error)
