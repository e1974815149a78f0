"""A replica's way to its drafter; used by the thread of the decoding steps alone."""

from __future__ import annotations

from contextlib import suppress
from secrets import token_bytes

import zmq

from specserve.sources.health_monitor import Find, HealthMonitor, Peer, Report, Wanted
from specserve.wire.frames import MAX_HEADER_BYTES, decode_reply, encode
from specserve.wire.messages import DraftRequest, Reply


class DrafterLink:
    """Sends requests and receives what is answered, to the drafter that a health monitor found.

    The drafter knows the link by one name, whichever connection it uses.

    Args:
        wanted: what the drafter has to be.
        find: where it is; called from a thread of its own.
        report: told the state several times a second, from that thread.
    """

    def __init__(self, wanted: Wanted, find: Find, report: Report) -> None:
        self._monitor = HealthMonitor(wanted, find, report)
        self._name = b"replica-" + token_bytes(8)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._peer: Peer | None = None

    def connect(self) -> Peer | None:
        """The drafter to ask in this step, connected to; None: there is none.

        Another object than before: some of what was sent to the one before may be lost.
        """
        peer = self._monitor.peer
        if peer is None or peer is self._peer:
            return peer
        old = self._peer
        if old is None or old.route != peer.route:
            self._hang_up()
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.ROUTING_ID, self._name)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
            self._socket.setsockopt(zmq.LINGER, 0)
            peer.endpoint.connect(self._socket)
        self._peer = peer
        return peer

    def send(self, request: DraftRequest) -> None:
        """Sends to the drafter last connected to; never waits. What cannot be sent is lost.

        The request's states must not change any more: they may be sent from where they are.
        """
        assert self._socket is not None
        with suppress(zmq.Again):
            self._socket.send_multipart(encode(request), zmq.NOBLOCK, copy=False)

    def receive(self, timeout_s: float) -> Reply | None:
        """The next reply of the drafter last connected to; None: none came in time.

        Raises:
            WireError: what came is no reply.
        """
        if self._socket is None:
            return None
        self._socket.setsockopt(zmq.RCVTIMEO, max(0, round(timeout_s * 1000)))
        try:
            frames = self._socket.recv_multipart()
        except zmq.Again:
            return None
        return decode_reply(frames)

    def trip(self, reason: str) -> None:
        """The drafter gave no drafts: it is asked again once it answers a later hello."""
        self._monitor.trip(reason)

    def reset(self) -> None:
        """The drafter answered in time."""
        self._monitor.reset()

    def close(self) -> None:
        """Ends the monitor's thread and the connection."""
        self._monitor.close()
        self._hang_up()
        self._context.term()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
