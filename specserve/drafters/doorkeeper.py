"""Lets in who knows a drafter's secret: ZeroMQ's PLAIN mechanism.

A connection begins with the secret, and no message is taken from it before that has been found
right. Messages cost nothing more by it; neither they nor the secret are encrypted.
"""

from __future__ import annotations

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
"""Connections that are dealt with before those that are let in are served."""


class Doorkeeper:
    """Guards the one listening socket of a context, with a random secret of its own.

    Args:
        context: the socket's.
        socket: not yet bound.

    Attributes:
        secret: what connections have to begin with.
        questions: readable when :meth:`answer` is to be called.
        refusals: readable when :meth:`take_refusals` is to be called.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        self.secret = token_urlsafe(32)
        self.questions = context.socket(zmq.REP)
        self.questions.setsockopt(zmq.LINGER, 0)
        self.questions.bind(_QUESTIONS)
        self.refusals = socket.get_monitor_socket(_REFUSALS)
        self._socket = socket
        socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def answer(self) -> None:
        """Tells ZeroMQ which of the connections that wait to let in."""
        for _ in range(_MOST_AT_ONCE):
            if not self.questions.poll(0):
                return
            version, number, *_, secret = self.questions.recv_multipart()
            is_right = compare_digest(secret, self.secret.encode())
            status = (b"200", b"") if is_right else (b"400", b"wrong secret")
            self.questions.send_multipart([version, number, *status, b"", b""])

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
        self.questions.close()
