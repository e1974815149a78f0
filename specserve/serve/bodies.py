"""Reads requests' bodies within limits of time and memory. Serve and uvicorn have none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

BODY_PAUSE_S = 30.0
"""Longest pause in seconds within a body. A call that is not read to its end takes one of the
replica's places."""
BODY_BYTES_PER_S = 16 << 10
"""A slower body uses up its pause, so that it cannot trickle in for ever."""
MAX_BODY_BYTES = 256 << 20
MAX_OPEN_BYTES = 1 << 30
"""Most bytes of all calls' bodies together. A node without free memory ends its replica."""


class Bodies:
    """The bodies of the calls that a replica is answering."""

    def __init__(self) -> None:
        self._open_bytes = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """Reads a call's body. It counts as open until the block ends.

        Raises:
            HTTPException: the body is too large (413), or it stops or is too slow (408), or the
                bodies of other calls leave no room for it (503).
            ClientDisconnect: the client has disconnected.
        """
        pieces, size = list[bytes](), 0
        try:
            async for piece in Request(scope, without_pauses(receive)).stream():
                pieces.append(piece)
                size += len(piece)
                self._open_bytes += len(piece)
                if size > MAX_BODY_BYTES:
                    detail = f"The body has more than {MAX_BODY_BYTES >> 20} MiB"
                    raise HTTPException(413, detail)
                if self._open_bytes > MAX_OPEN_BYTES:
                    detail = f"The bodies of all calls have more than {MAX_OPEN_BYTES >> 20} MiB"
                    raise HTTPException(503, detail)
            body = b"".join(pieces)
            pieces.clear()
            yield body
        finally:
            self._open_bytes -= size


def without_pauses(receive: Receive) -> Receive:
    """Receives a body's messages; raises ``HTTPException`` if it stops or is too slow."""
    time = asyncio.get_running_loop().time
    ends_at = time() + BODY_PAUSE_S

    async def receive_soon() -> Message:
        nonlocal ends_at
        try:
            async with asyncio.timeout_at(ends_at):
                message = await receive()
        except TimeoutError:
            slow = f"or it was slower than {BODY_BYTES_PER_S >> 10} KiB a second"
            detail = f"No more of the body came within {BODY_PAUSE_S:g} s, {slow}"
            raise HTTPException(408, detail) from None
        gained_s = len(message.get("body", b"")) / BODY_BYTES_PER_S
        ends_at = min(ends_at + gained_s, time() + BODY_PAUSE_S)
        return message

    return receive_soon
