"""Threads that train parts of a batch side by side, one core each.

One operation split over all cores waits for the slowest of them each time: on a machine that others
use too that costs most of the speed. Here the parts meet once a step.
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
    """`count` threads in each of which torch uses one core; one thread alone on a GPU."""

    def __init__(self, device: torch.device, count: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0))
        self.count = count or (1 if device.type == "cuda" else cores)
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(
            self.count, initializer=torch.set_num_threads, initargs=(1,)
        )

    def map(self, call: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """The results in the items' order."""
        return list(self._pool.map(call, items))
