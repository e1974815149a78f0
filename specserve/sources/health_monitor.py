"""Finds a replica's drafter and watches it, in a thread beside the decoding steps."""

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
from specserve.wire.messages import Card, Hello

logger = logging.getLogger(__name__)

Find = Callable[[], str | None]
"""Url of a drafter's :class:`Endpoint`, None: there is none now. May take seconds, may start one.
A :class:`SpecServeError` says why."""

Report = Callable[[bool, str], None]
"""Whether there is a drafter to ask; why there is none, as far as that is known."""

GREET_UP_S, GREET_DOWN_S = 1.0, 0.2
"""Time from one hello to the next, while the drafter is used and while it is not."""

SILENT_S = 2.0
"""A drafter that has left a hello without an answer for so long is looked for anew."""

MOST_SILENT_LOOKS = 15
"""Times that a drafter may be found that answers no hello before the log says so."""

LONGEST_REST_S = 10.0
"""Longest pause of requests to a drafter that answers hellos in time, but no request."""

TRIPS_TOLD = 6
"""Trips in a row until the log says so; they take some 10 seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a drafter has to be.

    Attributes:
        kind: ``draft_model`` or ``mtp``.
        vocab_size: of the target.
        tokenizer: hash of the target's vocabulary; empty: unknown.
        hidden_size: width of the target's states; 0: none are given.
        replica: who wants it.
    """

    kind: str
    vocab_size: int
    tokenizer: str
    hidden_size: int
    replica: str = ""

    def objection(self, card: Card) -> str:
        """Why a drafter does not fit, naming both values; empty: it does.

        Vocabularies that are known to be one may be padded to different sizes.
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
    """A drafter that answers; a new object whenever it has begun to.

    Attributes:
        endpoint: where it listens.
        instance: the process; another one has none of the texts.
        max_tokens: longest text that it drafts for.
        connection: another number: it is to be connected to anew, and what was sent may be lost.
    """

    endpoint: Endpoint
    instance: str
    max_tokens: int
    connection: int


class HealthMonitor:
    """Tells whether there is a drafter to ask: a circuit breaker with health checks.

    Each check is a hello. :meth:`trip` stops requests until a later hello is answered, for longer
    with each trip in a row; :meth:`reset` ends the row.

    Args:
        wanted: what the drafter has to be; another one is refused with one line in the log.
        find: where it is; called from this monitor's thread.
        report: told the state several times a second, from this monitor's thread.

    Attributes:
        peer: the drafter that may be asked now; None: there is none.
    """

    def __init__(self, wanted: Wanted, find: Find, report: Report) -> None:
        self._wanted, self._find, self._report = wanted, find, report
        self.peer: Peer | None = None
        self._reason = ""  # why there is none
        self._lock = threading.Lock()  # between trips and what is heard of the peer
        self._rest = Backoff(GREET_DOWN_S, LONGEST_REST_S)
        self._num_trips = self._connection = 0
        self._number = self._counts_from = 0  # of hellos; answers to earlier ones do not count
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._endpoint: Endpoint | None = None
        self._said_at = 0.0
        self._unheard_since: float | None = None
        self._num_silent_looks = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drafter-health", daemon=True)
        self._thread.start()

    def trip(self, reason: str) -> None:
        """A request was not answered in time: none is sent before a new hello is answered."""
        with self._lock:
            self.peer, self._reason = None, reason
            self._connection += self._num_trips > 0  # it may be the connection that is broken
            self._counts_from = self._number + 1
            self._rest.fail(time.monotonic())
            self._num_trips += 1
        if self._num_trips == TRIPS_TOLD:
            self._warn()

    def reset(self) -> None:
        """A request was answered in time: the next trip is the first again."""
        self._num_trips = 0
        self._rest.reset()

    def close(self) -> None:
        """Ends the thread; waits for a ``find`` that runs."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                since = self._unheard_since
                is_silent = since is not None and time.monotonic() - since > SILENT_S
                if self._socket is None or is_silent:
                    self._look()
                self._greet()
                self._listen()
            except SpecServeError as error:
                self._refuse(str(error))
                self._closing.wait(GREET_UP_S)
            except Exception:  # the thread must outlive every failure
                logger.exception("Looking for the %s drafter failed; it goes on", self._wanted.kind)
                self._closing.wait(SILENT_S)
            self._tell()
        self._hang_up()
        self._context.term()

    def _tell(self) -> None:
        is_up = self.peer is not None
        self._report(is_up, "" if is_up else self._reason)

    def _look(self) -> None:
        """Asks where the drafter is, and connects anew, also where it is still there."""
        with self._lock:
            self.peer = None
            self._connection += 1
        self._tell()  # finding it may take seconds
        if (found := self._find()) is not None:
            self._endpoint = Endpoint.parse(found)
        self._hang_up()
        if self._endpoint is None:
            self._closing.wait(GREET_UP_S)
            return
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._endpoint.connect(self._socket)
        self._said_at, self._unheard_since = 0.0, None
        self._num_silent_looks += found is not None
        if found is not None and self._num_silent_looks > MOST_SILENT_LOOKS:
            self._refuse(f"{self._endpoint.place} does not answer; is the way to its port open?")

    def _greet(self) -> None:
        now = time.monotonic()
        pause_s = GREET_DOWN_S if self.peer is None else GREET_UP_S
        if self._socket is None or now - self._said_at < pause_s:
            return
        self._said_at = now
        self._number += 1
        if self._unheard_since is None:
            self._unheard_since = now
        with suppress(zmq.Again):  # ZeroMQ has given up a connection that was refused
            hello = Hello(self._number, replica=self._wanted.replica)
            self._socket.send_multipart(encode(hello), zmq.NOBLOCK)

    def _listen(self) -> None:
        if self._socket is None or not self._socket.poll(int(GREET_DOWN_S * 1000)):
            return
        reply = decode_reply(self._socket.recv_multipart())
        if isinstance(reply, Card):
            assert self._endpoint is not None
            self._unheard_since, self._num_silent_looks = None, 0
            if objection := self._wanted.objection(reply):
                self._refuse(f"{reply.model} at {self._endpoint.place} has {objection}")
            else:
                self._accept(reply, self._endpoint)

    def _accept(self, card: Card, endpoint: Endpoint) -> None:
        with self._lock:
            if card.number < self._counts_from or not self._rest.is_due(time.monotonic()):
                return
            if self.peer is None or self.peer.instance != card.instance:
                self.peer = Peer(endpoint, card.instance, card.max_tokens, self._connection)
                self._reason = ""

    def _refuse(self, reason: str) -> None:
        with self._lock:
            is_new, self._reason = reason != self._reason, reason
            self.peer = None
        if is_new:
            self._warn()

    def _warn(self) -> None:
        logger.warning("No drafts from the %s drafter: %s", self._wanted.kind, self._reason)

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
