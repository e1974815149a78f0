"""The TCP ports that ``serve run`` binds on this machine, and the processes that use them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from specserve.core.errors import PortError

_ALL_INTERFACES = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Port:
    """A port to listen on.

    Attributes:
        host: name or IP address of the interface, or of all interfaces.
        number: the port number.
        what: the port's purpose, for errors, and the option that sets it if there is one.
    """

    host: str
    number: int
    what: str


def serve_ports(host: str, port: int) -> list[Port]:
    """Returns the ports of the proxy that this environment selects: HAProxy, or Serve's own.

    ``host`` and ``port`` are those of ``http_options`` in the Serve file.
    """
    from ray.serve._private import constants

    ports = [Port(host, port, "the API, http_options.port")]
    if constants.RAY_SERVE_ENABLE_HA_PROXY:
        ports += [
            Port(host, constants.RAY_SERVE_FALLBACK_PROXY_HTTP_PORT, "Serve's own proxy"),
            Port("127.0.0.1", constants.RAY_SERVE_HAPROXY_STATS_PORT, "HAProxy's statistics"),
            Port("127.0.0.1", constants.RAY_SERVE_HAPROXY_METRICS_PORT, "HAProxy's metrics"),
        ]
    return ports


def require_free(ports: Sequence[Port], wait_s: float = 0.0, joins_cluster: bool = False) -> None:
    """Checks that no process listens on any of the ports; waits up to ``wait_s`` seconds.

    With ``joins_cluster``, processes of a running Ray cluster may use the ports. The listening
    sockets are read, because a bind could succeed: HAProxy shares its ports with other processes of
    the same user that share theirs, such as another HAProxy.

    Raises:
        PortError: ports are in use. The message names all of them, and their processes if known.
    """
    deadline = time.monotonic() + wait_s
    while taken := _taken(ports, joins_cluster):
        if time.monotonic() >= deadline:
            raise PortError("; ".join(taken))
        time.sleep(0.1)


def _taken(ports: Sequence[Port], joins_cluster: bool) -> list[str]:
    listening = [
        each
        for each in psutil.net_connections(kind="tcp")
        if each.status == psutil.CONN_LISTEN
        and not (joins_cluster and each.pid and _is_of_cluster(each.pid))
    ]
    taken = []
    for port in ports:
        pids = [
            each.pid
            for each in listening
            if each.laddr.port == port.number and _overlap(each.laddr.ip, port.host)
        ]
        if pids:
            taken.append(f"port {port.number} ({port.what}) is in use by {_names(pids)}")
    return taken


def _overlap(address: str, host: str) -> bool:
    with suppress(OSError):
        host = socket.gethostbyname(host)
    return address == host or address in _ALL_INTERFACES or host in _ALL_INTERFACES


def _names(pids: Iterable[int | None]) -> str:
    known = sorted({pid for pid in pids if pid is not None})
    return ", ".join(map(_name, known)) or "a process that this user may not see"


def _name(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"


def _is_of_cluster(pid: int) -> bool:
    """Whether a Ray node started the process."""
    try:
        return any(parent.name() == "raylet" for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False
