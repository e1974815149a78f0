"""The drafter's end of the wire: a socket, and a thread of its own that reads and writes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from specserve.core.errors import WireError
from specserve.drafters.doorkeeper import Doorkeeper
from specserve.wire.endpoint import Endpoint
from specserve.wire.frames import MAX_FRAME_BYTES, decode_question, encode
from specserve.wire.messages import Question, Reply

MAX_QUEUED_BYTES = 256 << 20
"""Questions that nobody has taken yet. With more, no further ones are read: they stay in the
clients' and the sockets' own queues, which are bounded, and the clients are told to wait."""

_QUESTION_BYTES = 1024
"""Memory of a question beside its frames, and more than that."""

_PAUSE_MS = 10
"""How often a router that does not read looks whether it may again."""

_STOP = b""
"""No client is called so."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A question that came in.

    Attributes:
        client: who asks.
        question: what.
        at: when it came, monotonic seconds.
        num_bytes: the memory that it takes.
    """

    client: bytes
    question: Question
    at: float
    num_bytes: int


class Router:
    """Reads questions as they come, however long an answer takes, and sends the answers.

    :meth:`reply` and :meth:`close` are for one thread, :meth:`get` for the same.

    Args:
        bind: ZeroMQ address, port 0 for any free one.
        on_malformed: told of what came that was no question, on this router's thread.
        on_refused: told of connections without the right secret, on this router's thread.

    Attributes:
        address: where clients connect to, and with which secret: the url of an
            :class:`~specserve.wire.endpoint.Endpoint`.
        heard_at: when anything came last, monotonic seconds; at first the time of the start.
    """

    def __init__(
        self,
        bind: str,
        on_malformed: Callable[[WireError], None],
        on_refused: Callable[[], None],
    ) -> None:
        self._on_malformed, self._on_refused = on_malformed, on_refused
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # ZeroMQ closes the connection of a client that sends more.
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # A client that lost its connection comes back by its name.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._doorkeeper = Doorkeeper(self._context, self._socket)
        self._socket.bind(bind)
        place = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = Endpoint(place, self._doorkeeper.secret).url
        self.heard_at = time.monotonic()
        self._replies_out, self._replies_in = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._replies_out.setsockopt(zmq.RCVHWM, 0)
        self._replies_in.setsockopt(zmq.SNDHWM, 0)
        self._replies_out.bind("inproc://replies")
        self._replies_in.connect("inproc://replies")
        self._arrivals: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._put_bytes = self._taken_bytes = 0  # each changed by one thread alone
        self._thread = threading.Thread(target=self._run, name="drafter-wire", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> Arrival | None:
        """The next question; None: none came in time, or :meth:`wake` was called."""
        try:
            arrival = self._arrivals.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return None
        if arrival is not None:
            self._taken_bytes += arrival.num_bytes
        return arrival

    def wake(self) -> None:
        """Ends a :meth:`get` that waits; for any thread."""
        self._arrivals.put(None)

    def reply(self, client: bytes, reply: Reply) -> None:
        """Sends an answer; never waits."""
        self._replies_in.send_multipart([client, *encode(reply)])

    def close(self) -> None:
        """Sends the answers given so far, and ends the thread."""
        self._replies_in.send(_STOP)
        self._thread.join()
        self._replies_in.close()
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        door = self._doorkeeper
        for each in (self._replies_out, door.questions, door.refusals):
            poller.register(each, zmq.POLLIN)
        stopping = False
        while not stopping:
            is_full = self._put_bytes - self._taken_bytes > MAX_QUEUED_BYTES
            poller.register(self._socket, 0 if is_full else zmq.POLLIN)
            ready = dict(poller.poll(_PAUSE_MS if is_full else None))
            if self._socket in ready:
                self._receive()
            if door.questions in ready:
                door.answer()
            if door.refusals in ready:
                door.take_refusal()
                self._on_refused()
            if self._replies_out in ready:
                stopping = self._send()
        door.close()
        self._socket.close()
        self._replies_out.close()

    def _receive(self) -> None:
        client, *frames = self._socket.recv_multipart()
        now = self.heard_at = time.monotonic()
        try:
            question = decode_question(frames)
        except WireError as error:
            self._on_malformed(error)
        else:
            num_bytes = sum(map(len, frames)) + _QUESTION_BYTES
            self._put_bytes += num_bytes
            self._arrivals.put(Arrival(client, question, now, num_bytes))

    def _send(self) -> bool:
        """Sends an answer; true: there will be no more."""
        client, *frames = self._replies_out.recv_multipart()
        if client == _STOP:
            return True
        with suppress(zmq.Again):  # a client that does not read loses its answers
            self._socket.send_multipart([client, *frames], zmq.NOBLOCK)
        return False
