"""Snapshots of a token log: one file, whole or not there.

Layout: ``MAGIC``, version (uint32), then blocks, each a uint32 length and that many bytes of
msgpack: a :class:`SnapshotHeader`, and lists of records. A block of length 0 ends them, and a
BLAKE2b digest of all bytes before it ends the file. Integers are little-endian.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from specserve.core.errors import ConfigError, SnapshotError, shorten
from specserve.trie.records import Ranges, Record
from specserve.trie.token_log import LogState

logger = logging.getLogger(__name__)

MAGIC = b"SPECTRIE"
VERSION = 1
DIGEST_BYTES = 32
BLOCK_RECORDS = 256
"""Records written at a time: the encoder keeps the interpreter to itself for that long."""
MAX_BLOCK_BYTES = 64 << 20
"""A length above this is damage, and must not be allocated."""


class SnapshotHeader(msgspec.Struct, frozen=True):
    """What a snapshot says of itself, and all of a log but its records.

    Attributes:
        fingerprint: identity of the model and tokenizer whose tokens these are.
        epoch: the store's start that wrote it; positions are this epoch's.
        saved_at: seconds since 1970.
        end: see :class:`LogState`, as the next two.
        held: as above.
        tombstones: as above.
        num_records: records that follow.
    """

    fingerprint: str
    epoch: str
    saved_at: float
    end: int
    held: Ranges
    tombstones: list[Record] = msgspec.field(name="orders")
    num_records: int


class RefusedSnapshotError(Exception):
    """The file is no snapshot that can be used; says why."""


class SnapshotFile:
    """One snapshot at a URL.

    Any failure of the file system, a full disk among them, is a ``SnapshotError``.

    Args:
        url: a path, whose folder is made where it is missing, or a URL of any file system that
            fsspec knows.

    Raises:
        ConfigError: fsspec does not know the URL's scheme, or lacks a package for it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                "snapshot_url", url, f"a path, or a URL for fsspec: {error}"
            ) from None
        self._path = str(path)
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def save(self, fingerprint: str, epoch: str, state: LogState) -> int:
        """Writes the snapshot aside, then puts it in the place of the one that was there.

        Returns:
            The file's size in bytes.

        Raises:
            SnapshotError: it could not be written; the one that was there is as it was.
        """
        aside = f"{self._path}.new"
        try:
            if self._is_local:
                Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            size = self._write(aside, _encode(fingerprint, epoch, state))
            self._move(aside, self._path)
        except Exception as error:  # each file system has errors of its own
            with suppress(Exception):
                self._fs.rm_file(aside)
            raise SnapshotError(f"snapshot {self.url} was not written: {_say(error)}") from error
        return size

    def load_or_set_aside(self, fingerprint: str) -> tuple[str, LogState] | None:
        """Reads the snapshot.

        One that cannot be used is renamed to ``<name>.refused-<number>``, and the log says why.

        Returns:
            The epoch that wrote it, and what the log held; None: there is none to be used.

        Raises:
            SnapshotError: it cannot be used and could not be renamed either.
        """
        try:
            with self._fs.open(self._path, "rb") as file:
                return _decode(file, fingerprint)
        except FileNotFoundError:
            return None
        except Exception as error:
            reason = _say(error)
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

    def _write(self, path: str, chunks: Iterator[bytes]) -> int:
        size = 0
        with self._open_new(path) as file:
            for chunk in chunks:
                file.write(chunk)
                size += len(chunk)
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())
        return size

    def _open_new(self, path: str) -> Any:
        if self._is_local:  # it holds users' text: nobody else may read it
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        return self._fs.open(path, "wb")

    def _move(self, source: str, target: str) -> None:
        if not self._is_local:
            self._fs.mv(source, target)
            return
        os.replace(source, target)
        folder = os.open(Path(target).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _encode(fingerprint: str, epoch: str, state: LogState) -> Iterator[bytes]:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    header = SnapshotHeader(
        fingerprint=fingerprint,
        epoch=epoch,
        saved_at=time.time(),
        end=state.end,
        held=state.held,
        tombstones=state.tombstones,
        num_records=len(state.records),
    )
    for chunk in _chunks(header, state.records):
        digest.update(chunk)
        yield chunk
    yield digest.digest()


def _chunks(header: SnapshotHeader, records: list[Record]) -> Iterator[bytes]:
    encode = msgspec.msgpack.Encoder().encode
    yield MAGIC + struct.pack("<I", VERSION)
    yield _block(encode(header))
    for begin in range(0, len(records), BLOCK_RECORDS):
        yield _block(encode(records[begin : begin + BLOCK_RECORDS]))
    yield _block(b"")


def _block(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


class _Reader:
    """Reads exactly what is asked for, and sums up what was read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        if len(content) != size:
            raise RefusedSnapshotError("it is cut off")
        self.digest.update(content)
        return content

    def block(self) -> bytes:
        (size,) = struct.unpack("<I", self.read(4))
        if size > MAX_BLOCK_BYTES:
            raise RefusedSnapshotError("it is damaged")
        return self.read(size)


def _decode(file: BinaryIO, fingerprint: str) -> tuple[str, LogState]:
    reader = _Reader(file)
    if reader.read(len(MAGIC)) != MAGIC:
        raise RefusedSnapshotError("it is no snapshot of a draft memory")
    (version,) = struct.unpack("<I", reader.read(4))
    if version != VERSION:
        raise RefusedSnapshotError(f"it has version {version}, this is version {VERSION}")
    try:
        header = msgspec.msgpack.decode(reader.block(), type=SnapshotHeader)
        if header.fingerprint != fingerprint:
            raise RefusedSnapshotError(
                f"it is of {shorten(header.fingerprint)}, this is {shorten(fingerprint)}"
            )
        records: list[Record] = []
        decoder = msgspec.msgpack.Decoder(list[Record])
        while block := reader.block():
            records += decoder.decode(block)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise RefusedSnapshotError("it is damaged") from None
    digest = reader.digest.digest()
    if reader.read(DIGEST_BYTES) != digest or len(records) != header.num_records or file.read(1):
        raise RefusedSnapshotError("it is damaged")
    return header.epoch, LogState(header.end, header.held, header.tombstones, records)


def _say(error: Exception) -> str:
    if isinstance(error, RefusedSnapshotError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return shorten(str(error), 200).strip("'\"") or type(error).__name__
