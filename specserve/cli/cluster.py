"""A connection to a running Ray cluster, for commands that use one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from specserve.core.errors import SpecServeError

_CONNECT_S = 10.0


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connects this process to the Ray cluster at ``address`` within a ``with`` block.

    Raises:
        SpecServeError: no cluster answers at ``address``.
    """
    import ray
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray.exceptions import RayError

    try:
        found = canonicalize_bootstrap_address_or_die(address)
        host, _, port = found.rpartition(":")
        # If nothing listens on this port, `ray.init` waits for many minutes.
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        ray.init(found, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, RayError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        mode = os.environ.get("RAY_AUTH_MODE", "")
        hint = f"RAY_AUTH_MODE is {mode!r} here; `make serve` has 'token'"
        raise SpecServeError(f"no Ray cluster at {address}: {reason} ({hint})") from None
    try:
        yield
    finally:
        ray.shutdown()
