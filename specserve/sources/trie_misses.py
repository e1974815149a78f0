"""Tells of requests that the draft memory has no trie for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from specserve.core.metrics import SpeculationMetrics

logger = logging.getLogger(__name__)

TOLD_S = 600.0
"""How long a miss is told, unless a request of the same namespace finds a trie before."""


class TrieMisses:
    """Keeps the source's ``reason`` true, and logs a warning for each namespace that has no trie.

    Args:
        metrics: where the reason is shown.
        clock: monotonic seconds.
    """

    def __init__(
        self, metrics: SpeculationMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._misses: dict[str, tuple[float, str]] = {}

    def note(self, namespace: str, reason: str) -> None:
        """A request has begun.

        Args:
            namespace: whose it is.
            reason: why there is no trie for it; empty: there is one.
        """
        if not (reason or self._misses):  # as it mostly is
            return
        now = self._clock()
        known = self._misses.pop(namespace, None)
        self._misses = {name: miss for name, miss in self._misses.items() if miss[0] > now - TOLD_S}
        if reason:
            self._misses[namespace] = now, reason
            if known is None:
                logger.warning("No drafts from the trie: %s", reason)
        told = next((miss[1] for miss in reversed(self._misses.values())), "")
        self._metrics.set_reachable("trie", True, told)
