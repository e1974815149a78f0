"""Exports a drafter's counters through Ray, which adds the prefix ``ray_`` and scrapes nodes."""

from __future__ import annotations

import logging
import threading
import time

from ray.util.metrics import Counter

from specserve.core.metric_specs import OF_DRAFTERS
from specserve.drafters.counters import ServerCounters

logger = logging.getLogger(__name__)

EXPORT_INTERVAL_S = 1.0


class CounterExporter:
    """Feeds Ray's metrics from a drafter's counters, once a second, in a thread of its own.

    Args:
        counters: of the drafter's server.
        source: the drafter's kind.
        drafter: its name.
    """

    def __init__(self, counters: ServerCounters, source: str, drafter: str) -> None:
        self._counters = counters
        self._own = source, drafter
        self._series = {
            spec.name: Counter(spec.name, spec.description, tag_keys=spec.labels)
            for spec in OF_DRAFTERS
        }
        self._exported: dict[tuple[str, tuple[str, ...]], float] = {}
        self._thread = threading.Thread(target=self._run, name="specserve-metrics", daemon=True)

    def start(self) -> None:
        """Begins to export, until the process ends."""
        self._thread.start()

    def export(self) -> None:
        """Exports what was counted since the last call."""
        for spec, labels, total in self._counters.totals():
            before = self._exported.get((spec.name, labels), 0)
            self._exported[spec.name, labels] = total  # first: nothing is counted twice
            if total > before:
                tags = dict(zip(spec.labels, (*self._own, *labels), strict=True))
                self._series[spec.name].inc(total - before, tags=tags)

    def _run(self) -> None:
        while True:
            try:
                self.export()
            except Exception:
                logger.exception("The drafter's metrics could not be exported")
            time.sleep(EXPORT_INTERVAL_S)
