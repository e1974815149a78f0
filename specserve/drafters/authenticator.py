"""Lets in who knows a drafter's secret: ZeroMQ's PLAIN mechanism.

A connection begins with the secret, and no message is taken from it before that has been found
right. Messages cost nothing more by it; neither they nor the secret are encrypted. pyzmq's own
authenticator writes the secret into its debug log, and compares it in a time that depends on it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from secrets import compare_digest, token_urlsafe

import zmq

_QUESTIONS = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks about each new connection (ZAP, its RFC 27)."""

_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # also: the other side was the first to hang up
)

_MOST_AT_ONCE = 1024
"""Refusals that are counted before those that are let in are served."""


class Authenticator:
    """Guards the one listening socket of a context, with a random secret of its own.

    It has a thread, which ends with the context: connections are let in while the model computes,
    so that what comes over a new one waits no longer than over an old one.

    Args:
        context: the socket's.
        socket: not yet bound.

    Attributes:
        secret: what connections have to begin with.
        refusals: readable when :meth:`take_refusals` is to be called.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        self.secret = token_urlsafe(32)
        self._questions = context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(_QUESTIONS)
        self._thread = threading.Thread(target=self._answer, name="drafter-auth", daemon=True)
        self._thread.start()
        self.refusals = socket.get_monitor_socket(_REFUSALS)
        self._socket = socket
        socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def take_refusals(self) -> int:
        """How many connections were refused, which came with a wrong secret or without."""
        for number in range(_MOST_AT_ONCE):
            if not self.refusals.poll(0):
                return number
            self.refusals.recv_multipart()
        return _MOST_AT_ONCE

    def close(self) -> None:
        """To be called before the guarded socket is closed."""
        self._socket.disable_monitor()
        self.refusals.close()

    def join(self) -> None:
        """Waits for the thread, when the context is terminated."""
        self._thread.join()

    def _answer(self) -> None:
        """Tells ZeroMQ which connections to let in."""
        with suppress(zmq.ContextTerminated):
            while True:
                version, number, *_, secret = self._questions.recv_multipart()
                is_right = compare_digest(secret, self.secret.encode())
                status = (b"200", b"") if is_right else (b"400", b"wrong secret")
                self._questions.send_multipart([version, number, *status, b"", b""])
        self._questions.close()
