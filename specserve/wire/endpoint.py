"""Where a drafter listens, and the secret without which it lets nobody in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import zmq

USER = "replica"
"""ZeroMQ wants a name beside the secret."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A drafter's port, and what opens it.

    Processes tell each other the ``url``, ``tcp://SECRET@HOST:PORT``. Whoever has it may talk to
    the drafter: logs and answers show the ``place`` alone.

    Attributes:
        place: ``tcp://HOST:PORT``.
        secret: of the drafter's process; empty: the port is open.
    """

    place: str
    secret: str = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> Self:
        """The endpoint whose :attr:`url` this is."""
        scheme, _, rest = url.partition("://")
        secret, _, place = rest.rpartition("@")
        return cls(f"{scheme}://{place}", secret)

    @property
    def url(self) -> str:
        """Both in one."""
        return self.place.replace("://", f"://{self.secret}@", 1)

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Connects a socket; with another secret than the drafter's it never hears anything."""
        if self.secret:
            socket.setsockopt(zmq.PLAIN_USERNAME, USER.encode())
            socket.setsockopt(zmq.PLAIN_PASSWORD, self.secret.encode())
        socket.connect(self.place)
