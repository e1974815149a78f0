"""Importing vLLM in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Switches garbage collection off within the block.

    Importing vLLM creates a million objects, of which one in sixty is garbage. Collections take a
    quarter of the time: on an AMD EPYC, the import takes 6.4 s without them and 8.3 s with them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
