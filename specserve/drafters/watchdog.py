"""Ends a drafter's process whose model is broken; whoever started it starts it again."""

from __future__ import annotations

import logging
import os
import threading
import time

from specserve.drafters.base import Drafter
from specserve.drafters.server import MOST_FAILURES, DrafterServer

logger = logging.getLogger(__name__)

LONGEST_TURN_S = 300
"""A turn that takes longer hangs: no machine is slow enough for a forward of that length."""


def watched_server(drafter: Drafter, bind: str) -> DrafterServer:
    """A drafter's server, which ends this process when the model fails again and again, when a turn
    hangs, or when its thread has died within one."""
    server = DrafterServer(drafter, bind, on_broken=_end_failing)
    threading.Thread(target=_watch, args=(server,), name="drafter-watchdog", daemon=True).start()
    return server


def _watch(server: DrafterServer) -> None:
    num_seconds, last = 0, None
    while num_seconds < LONGEST_TURN_S:
        time.sleep(1.0)
        began = server.turn_began
        # Counted, not read from the clock: a process that was stopped for long does not hang.
        num_seconds = num_seconds + 1 if began is not None and began == last else 0
        last = began
    _end(f"A turn has taken {LONGEST_TURN_S} s")


def _end_failing() -> None:
    _end(f"The model has failed {MOST_FAILURES} turns in a row")


def _end(reason: str) -> None:
    logger.error("%s: this drafter ends", reason)
    os._exit(1)
