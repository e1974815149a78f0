"""Finds a replica's drafter and checks its health, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from specserve.core.backoff import Backoff
from specserve.core.errors import SpecServeError
from specserve.wire.endpoint import Endpoint
from specserve.wire.frames import decode_reply, encode
from specserve.wire.messages import Card, Greeting, Hello

logger = logging.getLogger(__name__)

Find = Callable[[], str | None]
"""Returns the URL of a drafter's :class:`Endpoint`; None: there is no drafter. It may take seconds
and may start a drafter. Raises :class:`SpecServeError` with the reason if that fails."""

Report = Callable[[bool, str], None]
"""Called with whether a drafter can be asked and, if not, the reason; empty: unknown."""

HELLO_UP_S, HELLO_DOWN_S = 1.0, 0.2
"""Interval of hello messages in seconds, while the drafter may be asked and while it may not."""

SEARCH_S = 300.0
"""Interval in seconds of further searches while a drafter answers. After one was replaced, another
may have fewer replicas."""

SILENT_S = 2.0
"""Seconds without an answer to a hello after which the monitor calls ``find`` again."""

MAX_SILENT_FINDS = 15
"""Times ``find`` may return a drafter that answers no hello before a warning is logged."""

MAX_BACKOFF_S = 10.0
"""Longest back-off in seconds for a drafter that answers hellos in time, but no requests."""

MAX_LOGGED_TRIPS = 6
"""Number of consecutive trips before a warning is logged; they take about 10 seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Properties that a replica requires of a drafter.

    Attributes:
        kind: ``draft_model`` or ``mtp``.
        vocab_size: of the target.
        tokenizer: hash of the target's vocabulary; empty: unknown.
        hidden_size: width of the target's hidden states; 0: none are sent.
        replica: name of the replica.
    """

    kind: str
    vocab_size: int
    tokenizer: str
    hidden_size: int
    replica: str = ""

    def mismatch(self, card: Card) -> str:
        """Why a drafter does not fit, with both values; empty: it fits.

        Sizes of equal vocabularies are not compared: their padding may differ.
        """
        pairs: list[tuple[str, object, object]] = [("kind", card.kind, self.kind)]
        if card.tokenizer and self.tokenizer:
            pairs.append(("tokenizer", card.tokenizer, self.tokenizer))
        else:
            pairs.append(("vocab_size", card.vocab_size, self.vocab_size))
        pairs.append(("hidden_size", card.hidden_size, self.hidden_size))
        return ", ".join(
            f"{name} {theirs!r} instead of {ours!r}"
            for name, theirs, ours in pairs
            if theirs != ours
        )


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """A drafter that answers hellos; a new object each time it starts to answer.

    Attributes:
        endpoint: where it listens.
        instance: random name of the process; a new process holds no texts.
        max_tokens: longest text that it drafts for.
        connection: if it changes, the client must reconnect; sent requests may be lost.
    """

    endpoint: Endpoint
    instance: str
    max_tokens: int
    connection: int


class HealthMonitor:
    """Circuit breaker: tells whether a drafter can be asked, by health checks.

    Each check is a hello message. :meth:`trip` stops requests until the back-off is over and a
    later hello is answered. Consecutive trips double the back-off; :meth:`reset` resets it.

    Args:
        wanted: what the drafter must be; another one is refused with one line in the log.
        find: finds the drafter; called from the monitor's thread.
        report: called with the state several times a second, from the monitor's thread.

    Attributes:
        peer: the drafter that may be asked now; None: there is none.
    """

    def __init__(self, wanted: Wanted, find: Find, report: Report) -> None:
        self._wanted, self._find, self._report = wanted, find, report
        self.peer: Peer | None = None
        self._reason = ""  # why peer is None
        self._lock = threading.Lock()  # trip() and the thread both change the peer
        self._backoff = Backoff(HELLO_DOWN_S, MAX_BACKOFF_S)
        self._num_trips = self._connection = 0
        self._number = self._first_valid = 0  # of hellos; answers to earlier ones are ignored
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._endpoint: Endpoint | None = None
        self._hello_sent_at = self._found_at = 0.0
        self._unanswered_since: float | None = None
        self._num_silent_finds = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drafter-health", daemon=True)
        self._thread.start()

    def trip(self, reason: str) -> None:
        """Stops requests after one failed or timed out, until a new hello is answered."""
        with self._lock:
            self.peer, self._reason = None, reason
            self._connection += self._num_trips > 0  # the connection may be broken
            self._first_valid = self._number + 1
            self._backoff.fail(time.monotonic())
            self._num_trips += 1
        if self._num_trips == MAX_LOGGED_TRIPS:
            self._warn()

    def reset(self) -> None:
        """Resets the back-off after a request was answered in time."""
        self._num_trips = 0
        self._backoff.reset()

    def close(self) -> None:
        """Ends the thread; waits for a running ``find``."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                since = self._unanswered_since
                is_silent = since is not None and time.monotonic() - since > SILENT_S
                if self._socket is None or is_silent:
                    self._reconnect()
                elif self.peer is not None and time.monotonic() - self._found_at > SEARCH_S:
                    self._search_again()
                self._send_hello()
                self._read_reply()
            except SpecServeError as error:
                self._refuse(str(error))
                self._closing.wait(HELLO_UP_S)
            except Exception:  # no failure may end the thread
                logger.exception("Looking for the %s drafter failed; retrying", self._wanted.kind)
                self._closing.wait(SILENT_S)
            self._report_state()
        self._disconnect()
        self._context.term()

    def _report_state(self) -> None:
        is_up = self.peer is not None
        self._report(is_up, "" if is_up else self._reason)

    def _reconnect(self) -> None:
        """Calls ``find`` and opens a new connection, even if the address is the same."""
        with self._lock:
            self.peer = None
            self._connection += 1
        self._report_state()  # find may take seconds
        self._connect(self._find())

    def _search_again(self) -> None:
        """Moves to another drafter if ``find`` returns one; keeps this one if it does not."""
        self._found_at = time.monotonic()
        found = None
        with suppress(SpecServeError):
            found = self._find()
        if found is not None and Endpoint.parse(found) != self._endpoint:
            with self._lock:
                self.peer = None
                self._connection += 1
            self._connect(found)

    def _connect(self, found: str | None) -> None:
        """Opens a connection to ``found``; None: to the drafter that was found last, if any."""
        if found is not None:
            self._endpoint, self._found_at = Endpoint.parse(found), time.monotonic()
        self._disconnect()
        if self._endpoint is None:
            self._closing.wait(HELLO_UP_S)
            return
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._endpoint.connect(self._socket)
        self._hello_sent_at, self._unanswered_since = 0.0, None
        self._num_silent_finds += found is not None
        if found is not None and self._num_silent_finds > MAX_SILENT_FINDS:
            self._refuse(f"{self._endpoint.place} does not answer; is the way to its port open?")

    def _send_hello(self) -> None:
        now = time.monotonic()
        pause_s = HELLO_DOWN_S if self.peer is None else HELLO_UP_S
        if self._socket is None or now - self._hello_sent_at < pause_s:
            return
        self._hello_sent_at = now
        self._number += 1
        if self._unanswered_since is None:
            self._unanswered_since = now
        with suppress(zmq.Again):  # ZeroMQ has dropped a refused connection
            hello = Hello(self._number, replica=self._wanted.replica)
            self._socket.send_multipart(encode(hello), zmq.NOBLOCK)

    def _read_reply(self) -> None:
        if self._socket is None or not self._socket.poll(int(HELLO_DOWN_S * 1000)):
            return
        reply = decode_reply(self._socket.recv_multipart())
        if isinstance(reply, Greeting):
            assert self._endpoint is not None
            self._unanswered_since, self._num_silent_finds = None, 0
            if mismatch := self._wanted.mismatch(reply.card):
                self._refuse(f"{reply.card.model} at {self._endpoint.place} has {mismatch}")
            else:
                self._accept(reply, self._endpoint)

    def _accept(self, greeting: Greeting, endpoint: Endpoint) -> None:
        with self._lock:
            if greeting.number < self._first_valid or not self._backoff.is_due(time.monotonic()):
                return
            if self.peer is None or self.peer.instance != greeting.instance:
                max_tokens = greeting.card.max_tokens
                self.peer = Peer(endpoint, greeting.instance, max_tokens, self._connection)
                self._reason = ""

    def _refuse(self, reason: str) -> None:
        with self._lock:
            is_new, self._reason = reason != self._reason, reason
            self.peer = None
        if is_new:
            self._warn()

    def _warn(self) -> None:
        logger.warning("No drafts from the %s drafter: %s", self._wanted.kind, self._reason)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
