"""Ends a drafter's process whose model is broken; whoever started it starts it again."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specserve.drafters.server import MOST_FAILURES, DrafterServer

logger = logging.getLogger(__name__)

LONGEST_TURN_S = 300
"""A turn that takes longer hangs: no machine is slow enough for a forward of that length."""


def end_failing() -> None:
    """For :class:`DrafterServer`: the model fails."""
    _end(f"The model has failed {MOST_FAILURES} turns in a row")


def end_hanging(server: DrafterServer) -> None:
    """Ends this process when a turn hangs, or its thread has died within one; returns at once."""
    _start(lambda: server.turn_began, threading.Event())


@contextmanager
def ended_if_it_hangs() -> Iterator[None]:
    """Ends this process when what is done within hangs, as a turn."""
    began, is_over = time.monotonic(), threading.Event()
    _start(lambda: began, is_over)
    try:
        yield
    finally:
        is_over.set()


def _start(turn_began: Callable[[], float | None], is_over: threading.Event) -> None:
    arguments = turn_began, is_over
    threading.Thread(target=_watch, args=arguments, name="drafter-watchdog", daemon=True).start()


def _watch(turn_began: Callable[[], float | None], is_over: threading.Event) -> None:
    num_seconds, last = 0, None
    while num_seconds < LONGEST_TURN_S:
        if is_over.wait(1.0):
            return
        began = turn_began()
        # Counted, not read from the clock: a process that was stopped for long does not hang.
        num_seconds = num_seconds + 1 if began is not None and began == last else 0
        last = began
    _end(f"A turn has taken {LONGEST_TURN_S} s")


def _end(reason: str) -> None:
    logger.error("%s: this drafter ends", reason)
    os._exit(1)
