"""A drafter's address, and the secret that its clients must know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import zmq

USER = "replica"
"""User name that ZeroMQ's PLAIN mechanism requires besides the secret."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A drafter's port and secret.

    Processes exchange the ``url``, ``tcp://SECRET@HOST:PORT``. Everyone who has it may use the
    drafter, so logs and answers show only the ``place``.

    Attributes:
        place: ``tcp://HOST:PORT``.
        secret: the secret of the drafter's process; empty: the port is open.
    """

    place: str
    secret: str = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> Self:
        """The endpoint of a :attr:`url`."""
        scheme, _, rest = url.partition("://")
        secret, _, place = rest.rpartition("@")
        return cls(f"{scheme}://{place}", secret)

    @property
    def url(self) -> str:
        """``place`` and ``secret`` in one string."""
        return self.place.replace("://", f"://{self.secret}@", 1)

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Connects a socket; with a wrong secret it never receives anything."""
        if self.secret:
            socket.setsockopt(zmq.PLAIN_USERNAME, USER.encode())
            socket.setsockopt(zmq.PLAIN_PASSWORD, self.secret.encode())
        socket.setsockopt(zmq.IPV6, "[" in self.place)
        socket.connect(self.place)
