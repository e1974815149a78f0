"""A test client of a drafter's server. It may also send invalid requests."""

from __future__ import annotations

import numpy as np
import zmq

from specserve.drafters.server import DrafterServer
from specserve.wire.endpoint import Endpoint
from specserve.wire.frames import decode_reply, encode
from specserve.wire.messages import (
    DraftAnswer,
    DraftRequest,
    Greeting,
    Hello,
    Question,
    Refusal,
    Reply,
    RowAnswer,
    TextRow,
)
from tests.drafters.fakes import VOCAB_SIZE, WAIT_S

TEXT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 5000).astype(np.int32)


class Client:
    """A replica's socket."""

    def __init__(self, server: DrafterServer, name: bytes = b"client") -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, name)
        self._socket.setsockopt(zmq.LINGER, 0)
        Endpoint.parse(server.address).connect(self._socket)
        self._number = 0

    def send(self, question: Question) -> None:
        self._socket.send_multipart(encode(question))

    def send_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> Reply:
        assert self._socket.poll(int(WAIT_S * 1000)), "no reply"
        return decode_reply(self._socket.recv_multipart())

    def request(self, *rows: TextRow, budget_s: float = 60.0, forget: tuple[int, ...] = ()) -> int:
        """Sends rows; returns the request's number."""
        self._number += 1
        self.send(
            DraftRequest(number=self._number, budget_s=budget_s, rows=tuple(rows), forget=forget)
        )
        return self._number

    def ask(self, *rows: TextRow) -> tuple[RowAnswer, ...]:
        number = self.request(*rows)
        answer = self.receive()
        assert isinstance(answer, DraftAnswer), answer
        assert answer.number == number
        return answer.rows

    def refused(self) -> str:
        reply = self.receive()
        assert isinstance(reply, Refusal), reply
        return reply.reason

    def ping(self, replica: str = "") -> None:
        """Waits until the server has read all earlier messages."""
        self.send(Hello(99, replica=replica))
        assert isinstance(self.receive(), Greeting)

    def close(self) -> None:
        self._socket.close()


def row(text: int, end: int, *, start: int = 0, draft: int = 2) -> TextRow:
    return TextRow(text=text, salt=0, start=start, tokens=TEXT[start:end], max_draft_tokens=draft)
