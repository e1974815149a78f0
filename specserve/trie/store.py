"""The cluster's draft memory: a log that all replicas write to and read from."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
from dataclasses import dataclass, field

import msgspec

from specserve.core.errors import ConfigError
from specserve.trie.log_snapshot import SnapshotFile
from specserve.trie.records import (
    MAX_NAME_CHARS,
    ExchangeReply,
    ExchangeRequest,
    Record,
    is_ahead,
    problem_of,
)
from specserve.trie.snapshot_keeper import SnapshotKeeper, SnapshotStats
from specserve.trie.token_log import LogState, TokenLog

logger = logging.getLogger(__name__)

NAME_PREFIX = "specserve-trie-"

SEEN_S = 10.0
"""Seconds without a call after which a replica counts as gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Options of a store.

    Attributes:
        fingerprint: identity of the model and tokenizer. It is part of the store's name, so that
            replicas of another model use another store: their tokens must not mix.
        max_bytes: memory of the log, in bytes.
        snapshot_url: folder of the snapshot, a path or a URL; empty for no snapshot.
        snapshot_interval_s: time between two snapshots, in seconds.
        resources: Ray resources that its actor reserves.
    """

    fingerprint: str
    vocab_size: int
    max_bytes: int = 256 << 20
    snapshot_url: str = ""
    snapshot_interval_s: float = 300.0
    resources: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the store in the cluster, unique for each fingerprint."""
        digest = hashlib.blake2b(self.fingerprint.encode(), digest_size=6)
        return f"{NAME_PREFIX}{digest.hexdigest()}"

    @property
    def snapshot_file(self) -> str:
        """URL of the snapshot; empty for no snapshot."""
        return self.snapshot_url and f"{self.snapshot_url.rstrip('/')}/{self.name}.snapshot"


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of a store; totals count from its start.

    Attributes:
        up_s: time since its start, in seconds.
        num_replicas: replicas and text writers that called within the last ``SEEN_S`` seconds.
        num_records: records in the log.
        num_tokens: tokens in the log.
        num_bytes: memory of the log in use.
        max_bytes: limit of ``num_bytes``.
        dropped_tokens: tokens dropped because the log was full, oldest first.
        snapshot: state of the snapshots; None if none are kept.
    """

    fingerprint: str
    up_s: float
    num_replicas: int
    num_records: int
    num_tokens: int
    num_bytes: int
    max_bytes: int
    tokens_by_namespace: dict[str, int]
    dropped_tokens: int
    snapshot: SnapshotStats | None


class TrieStore:
    """Takes records from replicas and gives them to the other replicas; thread-safe.

    It holds the log only; each replica builds its own tries. At start it loads the snapshot, if
    there is one.

    Raises:
        ConfigError: fsspec cannot use the snapshot's URL.
    """

    def __init__(self, options: StoreOptions) -> None:
        self.epoch = uuid.uuid4().hex
        self._options = options
        self._log = TokenLog(options.max_bytes)
        self._lock = threading.Lock()  # guards the log and the fields below
        self._began = time.monotonic()
        self._last_seen: dict[str, float] = {}
        self._num_tombstones = 0
        self._has_warned = False

        self._keeper: SnapshotKeeper | None = None
        if options.snapshot_url:
            self._keeper = SnapshotKeeper(
                SnapshotFile(options.snapshot_file, options.fingerprint),
                options.snapshot_interval_s,
                self._state,
                self._take_over,
            )
            self._keeper.start()

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """Stores a replica's records and replies with the records of other replicas."""
        with self._lock:
            is_new = request.epoch != self.epoch
            self._forget_silent_callers()
            self._last_seen[request.origin] = time.monotonic()
            for record in request.records:
                self._take(record)
            records, position, behind = self._log.since(
                0 if is_new else request.position,
                request.max_bytes,
                lambda record: record.origin != request.origin,
            )
            return ExchangeReply(
                epoch=self.epoch,
                position=position,
                records=records,
                behind=behind,
                held=self._log.held.ranges() if is_new else {},
                log_bytes=self._options.max_bytes,
                is_alone=len(self._last_seen) == 1,
                newest_purge=self._log.tombstones.newest,
            )

    def purge(self, namespace: str) -> int:
        """Forgets a namespace, or with a tenant's half of the name all namespaces of the tenant.

        The log and the snapshot are purged when this returns. Replicas follow when they read the
        log, even if the log holds no text of the namespace any more. Snapshots that were set aside
        stay; the operator deletes them.

        Returns:
            How many tokens the store has forgotten.

        Raises:
            ConfigError: ``namespace`` cannot be the name of a namespace.
            SnapshotError: forgotten, but the snapshot could not be written and still has the text.
        """
        with self._lock:
            self._num_tombstones += 1
            before = self._log.num_tokens
            tombstone = Record(
                origin=self.epoch,
                number=self._num_tombstones,
                # Covers also the text of a replica whose clock is fast.
                stamp=max(time.time(), self._log.newest_stamp(namespace)),
                namespace=namespace,
                kind="purge",
            )
            if problem_of(tombstone, self._options.vocab_size):
                allowed = f"1 .. {MAX_NAME_CHARS} ASCII characters"
                raise ConfigError("purge", namespace, allowed)
            self._log.append(tombstone)
            forgotten = before - self._log.num_tokens
        self.snapshot_now()
        return forgotten

    def snapshot_now(self) -> int:
        """Writes the snapshot and returns its size in bytes, 0 if none is kept.

        Raises:
            SnapshotError: it could not be written; the previous one is unchanged.
        """
        return self._keeper.save_now() if self._keeper is not None else 0

    def close(self) -> None:
        """Writes a last snapshot; a failure is logged."""
        if self._keeper is not None:
            self._keeper.stop()

    def stats(self) -> StoreStats:
        """Current state of the store."""
        now = time.monotonic()
        with self._lock:
            log = self._log
            self._forget_silent_callers()
            return StoreStats(
                fingerprint=self._options.fingerprint,
                up_s=now - self._began,
                num_replicas=len(self._last_seen),
                num_records=log.num_records,
                num_tokens=log.num_tokens,
                num_bytes=log.num_bytes,
                max_bytes=self._options.max_bytes,
                tokens_by_namespace=dict(log.tokens_by_namespace),
                dropped_tokens=log.dropped_tokens,
                snapshot=self._keeper.stats() if self._keeper is not None else None,
            )

    def _take(self, record: Record) -> None:
        problem = problem_of(record, self._options.vocab_size)
        if not problem and is_ahead(record):
            problem = "its stamp is in the future: compare the nodes' clocks"
        if not problem:
            self._log.append(record)
        elif not self._has_warned:
            self._has_warned = True
            logger.warning("A record is dropped: %s. Further ones are not logged", problem)

    def _forget_silent_callers(self) -> None:
        since = time.monotonic() - SEEN_S
        self._last_seen = {origin: at for origin, at in self._last_seen.items() if at > since}

    def _state(self) -> LogState:
        with self._lock:
            return self._log.state()

    def _take_over(self, state: LogState) -> None:
        # Texts from the future are taken: this node's clock may be slow until it is set.
        vocab_size = self._options.vocab_size
        good = [each for each in state.records if not problem_of(each, vocab_size)]
        with self._lock:
            self._log.restore(msgspec.structs.replace(state, records=good))
