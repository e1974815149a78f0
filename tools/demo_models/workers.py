"""Threads that train parts of a batch in parallel, one core each.

If torch splits each operation over all cores, each operation waits for the slowest core. On a
shared machine this costs most of the speed. These threads synchronise once per step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


class Workers:
    """A pool of `count` threads, in each of which torch uses one core; on a GPU one thread."""

    def __init__(self, device: torch.device, count: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0))
        self.count = count or (1 if device.type == "cuda" else cores)
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(
            self.count, initializer=torch.set_num_threads, initargs=(1,)
        )

    def map(self, call: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """Calls `call` for each item in the pool; returns the results in the items' order."""
        return list(self._pool.map(call, items))
