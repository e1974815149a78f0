"""A drafter's ZeroMQ socket: authenticates clients, reads their messages, sends answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_urlsafe

import zmq
from zmq.auth.thread import ThreadAuthenticator

from specserve.core.errors import WireError
from specserve.wire.endpoint import USER, Endpoint
from specserve.wire.frames import MAX_FRAME_BYTES, decode_question, encode
from specserve.wire.messages import Question, Reply

_MAX_AT_ONCE = 1024
"""Most messages that are read before work continues, so that a client that floods the socket does
not delay the others' answers."""

_QUESTION_BYTES = 1024
"""Generous estimate of a message's memory besides its frames, in bytes."""

_HANDSHAKE_MS = 2000
"""Time for a connection to present the secret. Until then its messages may take memory."""

_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # also if the client disconnects first
)

_silent = logging.Logger("pyzmq's authenticator")
_silent.disabled = True  # at level DEBUG it would log the secret


@dataclass(frozen=True, slots=True)
class Arrival:
    """A client's message, the monotonic time in seconds when it was read, and its size in bytes."""

    client: bytes
    question: Question
    at: float
    num_bytes: int


class Router:
    """Reads messages of clients that know its secret, and sends answers.

    A client first sends the secret (ZeroMQ's PLAIN mechanism). A separate thread checks it, even
    while the model computes. Later messages need no check. Nothing is encrypted.

    Call it only from the thread that computes: handing messages between threads would take longer.
    Messages that arrive during a model call wait in ZeroMQ's queues, which are limited in length.

    Args:
        bind: ZeroMQ address, port 0 for any free one.
        on_malformed: called for each message that cannot be decoded.
        on_refused: called for each connection without the right secret.

    Attributes:
        address: where clients connect, and their secret: the url of an
            :class:`~specserve.wire.endpoint.Endpoint`.
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
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        # A client that reconnects keeps its name.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, bind.count(":") > 2)  # Ray's addresses have no brackets
        secret = token_urlsafe(32)
        self._authenticator = ThreadAuthenticator(self._context, log=_silent)
        self._authenticator.start()
        self._authenticator.configure_plain("*", {USER: secret})
        self._refusals = self._socket.get_monitor_socket(_REFUSALS)
        self._socket.setsockopt(zmq.PLAIN_SERVER, 1)
        self._socket.bind(bind)
        self.address = Endpoint(self._socket.getsockopt_string(zmq.LAST_ENDPOINT), secret).url
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._refusals, zmq.POLLIN)

    def get(self, timeout_s: float) -> list[Arrival]:
        """Reads the messages that have arrived; waits up to ``timeout_s`` seconds for the first.

        Returns:
            the messages; empty if no valid one came.
        """
        ready = dict(self._poller.poll(round(timeout_s * 1000)))
        if self._refusals in ready:
            for _ in range(_MAX_AT_ONCE):
                self._refusals.recv_multipart()
                self._on_refused()
                if not self._refusals.poll(0):
                    break
        return self._questions() if self._socket in ready else []

    def reply(self, client: bytes, reply: Reply) -> None:
        """Sends an answer without waiting."""
        with suppress(zmq.Again):  # a client that does not read loses its answers
            self._socket.send_multipart([client, *encode(reply)], zmq.NOBLOCK)

    def close(self) -> None:
        """Ends all connections."""
        self._socket.disable_monitor()
        self._refusals.close()
        self._socket.close()
        self._authenticator.stop()
        self._context.term()

    def _questions(self) -> list[Arrival]:
        arrivals = []
        for _ in range(_MAX_AT_ONCE):
            client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                question = decode_question(frames)
            except WireError as error:
                self._on_malformed(error)
            else:
                num_bytes = sum(map(len, frames)) + _QUESTION_BYTES
                arrivals.append(Arrival(client, question, time.monotonic(), num_bytes))
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
        return arrivals
