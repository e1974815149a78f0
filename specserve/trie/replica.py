"""A replica's link to the cluster's draft memory: a thread beside the decoding loop."""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from specserve.core.errors import StoreError
from specserve.core.metrics import LinkSnapshot
from specserve.trie.outbox import Outbox
from specserve.trie.records import (
    ExchangeReply,
    ExchangeRequest,
    Record,
    StoreClient,
    TextPiece,
    records_of,
)

logger = logging.getLogger(__name__)

BATCH_BYTES = 256 << 10
"""Bytes of records in one call, in each direction."""

ALONE_FACTOR = 5.0
"""Factor on the call interval while no other replica is there to read this one's text."""

MAX_BACKOFF_S = 1.0
"""Longest back-off between calls while the store does not answer, in seconds."""

REFUSED_BACKOFF_S = 30.0
"""Time between calls after the store has refused this replica, in seconds."""

MAX_QUEUED = 1 << 12
"""Records that may wait for the thread, at most 16 KiB each; more text is dropped."""

LAST_SEND_S = 1.0
"""Longest time in seconds for a replica that ends to send its last texts."""

STARTING_CALLS = 2
"""Failed calls before the first warning: a store takes some seconds to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How a replica exchanges records with the store.

    Attributes:
        max_bytes: memory for recent records of all replicas, in bytes. A store that has lost its
            memory gets them back from this replica.
        interval_s: time from the start of one call to the next while no records wait, in seconds;
            :data:`ALONE_FACTOR` times as long while no other replica runs.
        deadline_s: timeout of a call, in seconds.
    """

    max_bytes: int = 64 << 20
    interval_s: float = 0.1
    deadline_s: float = 2.0


class TrieReplica:
    """Publishes this replica's text to the store and applies the records of other replicas.

    Any thread may read the attributes. Totals count from the start.

    Args:
        apply: called once for each record of another replica, tombstones included, on the
            link's thread.

    Attributes:
        origin: origin of this replica's records.
        up: whether the store answered the last call.
        refused: why the store refuses this replica; empty if it does not.
        epoch: identity of the store, new at each start; empty before the first reply.
        received_tokens: tokens of other replicas' records.
        receive_lag_s: age of the oldest token in the last batch, in seconds by the writers' clocks.
            Tokens written before this replica first reached the end of the log do not count.
        apply_errors: records for which ``apply`` raised an error.
    """

    def __init__(
        self, client: StoreClient, apply: Callable[[Record], None], options: ReplicaOptions
    ) -> None:
        self.origin = uuid.uuid4().hex[:16]
        self.up = False
        self.refused = self.epoch = ""
        self.received_tokens = self.apply_errors = 0
        self.receive_lag_s = 0.0
        self._client = client
        self._apply = apply
        self._options = options
        self._queue: deque[Record] = deque()
        # Each field from here on is written by only one of the two threads.
        self._num_dropped = self._num_records = 0
        self._outbox = Outbox(self.origin, options.max_bytes)
        self._position = self._failures_in_a_row = 0
        self._outage_logged = False
        self._oldest_unsent = self._caught_up_at = inf
        self._restarted_at = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trie-replica", daemon=True)
        self._last_call_at = inf  # stop() sets it; no call begins later

    def start(self) -> None:
        """Starts the thread; returns at once."""
        self._thread.start()

    def publish(self, piece: TextPiece) -> None:
        """See :meth:`specserve.trie.memory.SharedMemory.publish`; takes microseconds.

        For one thread at a time. The pieces of a request have to come in order.
        """
        if len(self._queue) >= MAX_QUEUED:
            self._num_dropped += len(piece.tokens)
            return
        records = records_of(self.origin, self._num_records + 1, piece)
        self._num_records += len(records)
        self._queue.extend(records)

    def stop(self, timeout_s: float = 3.0) -> bool:
        """Sends the remaining records, then ends the thread.

        Returns:
            Whether the store has confirmed everything within ``timeout_s`` seconds.
        """
        self._last_call_at = time.monotonic() + timeout_s
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._oldest_unsent == inf

    def close(self) -> None:
        """Sends the remaining records, for at most ``LAST_SEND_S`` seconds, and ends the thread."""
        if not self.stop(LAST_SEND_S):
            logger.warning("The draft memory did not take all that this replica learned last")

    def link(self) -> LinkSnapshot:
        """State of the connection to the store."""
        lag_s = max(self.unsent_s, self.receive_lag_s)
        return LinkSnapshot(self.up, lag_s, self.received_tokens, self.dropped_tokens)

    @property
    def dropped_tokens(self) -> int:
        """Own tokens that no other replica gets: the queue or the outbox was full."""
        return self._num_dropped + self._outbox.dropped_tokens

    @property
    def unsent_s(self) -> float:
        """Age of the oldest own token that the store has not confirmed, in seconds.

        At most the time since the store restarted: then it lacks text that it had confirmed.
        """
        return max(0.0, time.time() - self._oldest_unsent)

    def take_turn(self) -> float:
        """Makes one call to the store; the thread does this.

        Returns:
            Time from the start of this turn to the next, in seconds.
        """
        try:
            for _ in range(len(self._queue)):
                self._outbox.write(self._queue.popleft())
            rest_s = self._exchange()
            oldest_queued = self._queue[0].stamp if self._queue else inf
            oldest = min(self._outbox.oldest_unsent_stamp, oldest_queued)
            self._oldest_unsent = max(oldest, self._restarted_at)
        except Exception:  # no error may end the thread
            logger.exception("The link to the draft memory failed; it goes on")
            self.up = False
            rest_s = MAX_BACKOFF_S
        return rest_s

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            rest_s = self.take_turn()
            self._stopping.wait(max(0.0, began + rest_s - time.monotonic()))
        while time.monotonic() < self._last_call_at:
            self.take_turn()
            if not self.up or self._oldest_unsent == inf:
                return

    def _exchange(self) -> float:
        records = self._outbox.pending(BATCH_BYTES)
        request = ExchangeRequest(self.origin, self.epoch, self._position, records, BATCH_BYTES)
        deadline_s = min(self._options.deadline_s, self._last_call_at - time.monotonic())
        try:
            reply = self._client.exchange(request, max(0.0, deadline_s))
        except StoreError as error:
            return self._note_failure(error)
        if reply.refused:
            return self._note_refusal(reply.refused)
        self._note_answer()
        self._outbox.confirm(records)
        if reply.epoch != self.epoch:
            if self.epoch:
                logger.warning("The draft memory has restarted; lost records are sent again")
                if self._oldest_unsent == inf:  # else the lag goes on
                    self._restarted_at = time.time()
            self.epoch = reply.epoch
            self._outbox.start_over(reply.held)
        # A restarted store also hands out what this replica knows.
        new = [record for record in reply.records if self._outbox.receive(record)]
        for record in new:
            self._apply_one(record)
        self._note_progress(reply, new)
        if reply.behind or not self._outbox.is_empty:
            return 0.0
        return self._options.interval_s * (ALONE_FACTOR if reply.is_alone else 1.0)

    def _apply_one(self, record: Record) -> None:
        self.received_tokens += record.num_tokens
        try:
            self._apply(record)
        except Exception:  # an error in one record must not stop the others
            self.apply_errors += 1
            if self.apply_errors == 1:
                logger.exception("A record was not applied. Further ones are only counted")

    def _note_progress(self, reply: ExchangeReply, new: list[Record]) -> None:
        self._position = reply.position
        now = time.time()
        stamps = [each.stamp for each in new if each.stamp > self._caught_up_at]
        self.receive_lag_s = max(0.0, now - min(stamps, default=now))
        if not reply.behind:
            self._caught_up_at = min(self._caught_up_at, now)

    def _note_answer(self) -> None:
        if self._outage_logged:
            logger.warning("The draft memory answers again")
        self.up, self._outage_logged, self.refused, self._failures_in_a_row = True, False, "", 0

    def _note_failure(self, error: StoreError) -> float:
        self.up = False
        self._failures_in_a_row += 1
        if not self._outage_logged and (self.epoch or self._failures_in_a_row > STARTING_CALLS):
            self._outage_logged = True
            logger.warning("The draft memory does not answer, drafts go on without it: %s", error)
        longest_s = min(MAX_BACKOFF_S, 0.1 * 2.0 ** min(self._failures_in_a_row, 10))
        return random.uniform(0.5, 1.0) * longest_s

    def _note_refusal(self, reason: str) -> float:
        if not self.refused:
            logger.error("Drafts go on without the cluster's memory: %s", reason)
        self.up, self.refused = False, reason
        return REFUSED_BACKOFF_S
