"""Sends a replica's requests to its drafter and receives the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from secrets import token_bytes
from typing import NamedTuple

import zmq

from specserve.core.errors import WireError
from specserve.core.types import Int64Array
from specserve.wire.endpoint import Endpoint
from specserve.wire.frames import MAX_HEADER_BYTES, decode_reply, encode
from specserve.wire.messages import DraftAnswer, DraftRequest, Refusal, TextRow

LOST_S = 1.0
"""Seconds after the end of its budget until a request without an answer is given up."""

MAX_READING_S = 0.01
"""Most seconds for reading replies that a step does not wait for: a flood must not delay it."""


class Sent(NamedTuple):
    """An unanswered request.

    Attributes:
        number: identifies it.
        slots: int64 ``[m]``, of its rows' texts.
        num_read: positions that the drafter computes for it, if it asks for no drafts; else 0.
        state_bytes: size of its hidden states.
        expires_at: monotonic time when its budget ends.
    """

    number: int
    slots: Int64Array
    num_read: int
    state_bytes: int
    expires_at: float


class DrafterLink:
    """Sends requests to the drafter that a health monitor found, and receives the answers.

    Only the thread of the decoding steps may use it. It keeps its ZeroMQ identity when it
    reconnects.

    Args:
        on_malformed: called for each message that is not a valid reply.

    Attributes:
        sent: unanswered requests, by number.
    """

    def __init__(self, on_malformed: Callable[[], None]) -> None:
        self.sent: dict[int, Sent] = {}
        self._on_malformed = on_malformed
        self._name = b"replica-" + token_bytes(8)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._num_requests = 0

    def connect(self, endpoint: Endpoint) -> None:
        """Connects to a drafter; closes an earlier connection."""
        self._disconnect()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self._name)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        endpoint.connect(self._socket)

    def send(
        self,
        slots: Int64Array,
        rows: Sequence[TextRow],
        ended: Sequence[int],
        budget_s: float,
        num_read: int = 0,
    ) -> int:
        """Sends a request without waiting. A request that cannot be sent now is dropped.

        Args:
            slots: int64 ``[m]``, of the rows' texts.
            rows: m rows. Their states must not change afterwards, because they are not copied.
            ended: numbers of texts that the drafter can forget.
            budget_s: seconds for which the answer is useful.
            num_read: see :class:`Sent`.

        Returns:
            The request's number, above 0.
        """
        assert self._socket is not None
        self._num_requests += 1
        state_bytes = sum(row.states.nbytes for row in rows if row.states is not None)
        expires_at = time.monotonic() + budget_s
        sent = Sent(self._num_requests, slots, num_read, state_bytes, expires_at)
        self.sent[sent.number] = sent
        request = DraftRequest(
            number=sent.number, budget_s=budget_s, rows=tuple(rows), forget=tuple(ended)
        )
        with suppress(zmq.Again):
            self._socket.send_multipart(encode(request), zmq.NOBLOCK, copy=False)
        return sent.number

    def replies(self, deadline: float = 0.0) -> Iterator[tuple[Sent, DraftAnswer | Refusal]]:
        """Yields replies until a monotonic time, by default those that have already arrived."""
        end = max(deadline, time.monotonic() + MAX_READING_S)
        while self._socket is not None and (now := time.monotonic()) < end:
            self._socket.setsockopt(zmq.RCVTIMEO, max(0, round(1000 * (deadline - now))))
            try:
                reply = decode_reply(self._socket.recv_multipart())
            except zmq.Again:
                return
            except WireError:
                self._on_malformed()
                continue
            if isinstance(reply, DraftAnswer | Refusal) and (
                sent := self.sent.pop(reply.number, None)
            ):
                yield sent, reply

    def give_up(self, latest: float = float("inf")) -> list[Sent]:
        """Removes and returns the requests whose budget ended before a monotonic time."""
        lost = [each for each in self.sent.values() if each.expires_at < latest]
        for each in lost:
            del self.sent[each.number]
        return lost

    def close(self) -> None:
        """Closes the connection."""
        self._disconnect()
        self._context.term()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
