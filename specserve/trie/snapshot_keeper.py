"""Reads the store's snapshot at start, and writes it at a fixed interval."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from specserve.core.errors import SnapshotError
from specserve.trie.log_snapshot import SnapshotFile
from specserve.trie.records import Ranges
from specserve.trie.token_log import LogState

logger = logging.getLogger(__name__)

MAX_WAITING_SAVES = 4
"""Calls that may wait for a snapshot. A store runs eight calls at a time: if the file system hangs,
four remain for the replicas."""

START_S = 60.0
"""Longest wait of a starting store for its snapshot, in seconds. A large one takes tens of them."""


class SnapshotStats(msgspec.Struct, kw_only=True):
    """State of the snapshots; totals count from the start of the store.

    Attributes:
        num_errors: failed writes and reads.
        last_error: the last failure; empty after the next successful read or write.
        age_s: time since the last write, in seconds; -1 before the first.
        num_bytes: size of the last snapshot written, in bytes.
    """

    url: str
    num_saved: int = 0
    num_errors: int = 0
    last_error: str = ""
    age_s: float = -1.0
    num_bytes: int = 0


class SnapshotKeeper:
    """Keeps one snapshot file up to date; thread-safe.

    If the file system fails at start, each interval tries again to read the snapshot. If it hangs,
    the store starts without the snapshot, which is taken over when it has been read. Until then,
    nothing is written over it.

    Args:
        state: returns the content to save.
        take_over: called with the content of the snapshot that was read.
    """

    def __init__(
        self,
        file: SnapshotFile,
        interval_s: float,
        state: Callable[[], LogState],
        take_over: Callable[[LogState], None],
    ) -> None:
        self._file = file
        self._interval_s = interval_s
        self._state = state
        self._take_over = take_over
        self._lock = threading.Lock()
        self._asking = threading.BoundedSemaphore(MAX_WAITING_SAVES)
        self._was_read = False
        self._saved: Ranges = {}
        self._saved_at = 0.0
        self._stats = SnapshotStats(url=file.url)
        self._was_tried, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)

    def start(self) -> None:
        """Starts the schedule. Waits at most ``START_S`` seconds until the snapshot is loaded."""
        self._thread.start()
        if not self._was_tried.wait(START_S):
            logger.warning("%s is being read; the store starts without it", self._file.url)

    def save_now(self) -> int:
        """Writes a snapshot and returns its size in bytes.

        Raises:
            SnapshotError: it could not be written, and the previous one is unchanged; or too many
                calls wait for one.
        """
        if not self._asking.acquire(blocking=False):
            reason = f"{MAX_WAITING_SAVES} calls wait for a snapshot already"
            raise SnapshotError(f"{self._file.url}: {reason}; ask again when it is written")
        try:
            with self._lock:
                return self._save()
        except SnapshotError as error:
            self._count(error)
            raise
        finally:
            self._asking.release()

    def stop(self) -> None:
        """Writes a last snapshot and ends the schedule; a failure is logged."""
        self._stopping.set()
        self._thread.join()
        self._try()

    def stats(self) -> SnapshotStats:
        """Current state of the snapshots."""
        age_s = time.monotonic() - self._saved_at if self._stats.num_saved else -1.0
        return msgspec.structs.replace(self._stats, age_s=age_s)

    def _run(self) -> None:
        self._try()
        self._was_tried.set()
        while not self._stopping.wait(self._interval_s):
            self._try()

    def _try(self) -> None:
        with self._lock:
            try:
                self._save(only_changes=True)
            except SnapshotError as error:
                self._count(error)
                logger.error("%s; tried again in %g s", error, self._interval_s)

    def _read(self) -> None:
        loaded = self._file.load_or_set_aside()
        if loaded is not None:
            self._take_over(loaded)
            self._saved = loaded.held
        self._was_read = True
        self._stats.last_error = ""

    def _save(self, only_changes: bool = False) -> int:
        if not self._was_read:
            self._read()
        state = self._state()
        if only_changes and state.held == self._saved:
            return self._stats.num_bytes
        self._stats.num_bytes = self._file.save(state)
        self._saved, self._saved_at = state.held, time.monotonic()
        self._stats.num_saved += 1
        self._stats.last_error = ""
        return self._stats.num_bytes

    def _count(self, error: SnapshotError) -> None:
        self._stats.num_errors += 1
        self._stats.last_error = str(error)
