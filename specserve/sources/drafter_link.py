"""A replica's way to its drafter: requests, and the answers to them."""

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
"""An answer that comes so much later than its request's budget is not waited for."""

MOST_READING_S = 0.01
"""Time to read what has come: a drafter that floods must not hold a step up."""


class Sent(NamedTuple):
    """A request that is not answered yet.

    Attributes:
        number: its name.
        slots: int64 ``[m]``, of its rows' texts.
        num_read: positions of a text that is only brought up to date; 0: drafts are waited for.
        state_bytes: size of its states.
        expires_at: monotonic time when its budget is over.
    """

    number: int
    slots: Int64Array
    num_read: int
    state_bytes: int
    expires_at: float


class DrafterLink:
    """Sends requests to the drafter that a health monitor found, and receives the answers.

    Used by the thread of the decoding steps alone. The drafter knows the link by one name,
    whichever connection it uses.

    Args:
        on_malformed: told of what came that is no reply.

    Attributes:
        sent: requests that are not answered yet, by number.
    """

    def __init__(self, on_malformed: Callable[[], None]) -> None:
        self.sent: dict[int, Sent] = {}
        self._on_malformed = on_malformed
        self._name = b"replica-" + token_bytes(8)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._num_requests = 0

    def connect(self, endpoint: Endpoint) -> None:
        """Connects to a drafter, anew where it was connected."""
        self._hang_up()
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
        """Sends a request; never waits. What cannot be sent is lost.

        Args:
            slots: int64 ``[m]``, of the rows' texts.
            rows: m. Their states must not change any more: they may be sent from where they are.
            ended: numbers of texts that are to be forgotten.
            budget_s: how long the answer is of use, in seconds.
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
        """Takes replies to what was sent until a monotonic time; without one, what has come."""
        end = max(deadline, time.monotonic() + MOST_READING_S)
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
        """Requests whose budget was over before a monotonic time; they are not waited for."""
        lost = [each for each in self.sent.values() if each.expires_at < latest]
        for each in lost:
            del self.sent[each.number]
        return lost

    def close(self) -> None:
        """Ends the connection."""
        self._hang_up()
        self._context.term()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
