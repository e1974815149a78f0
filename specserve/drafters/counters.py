"""What a drafter counts, and its export through Ray, which adds the prefix ``ray_``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from specserve.core.metric_specs import (
    DRAFTER_COMPUTE,
    DRAFTER_REFUSED,
    DRAFTER_ROWS,
    OF_DRAFTERS,
    MetricSpec,
)

logger = logging.getLogger(__name__)

EXPORT_INTERVAL_S = 1.0

Refused = Literal["malformed", "unauthorized", "unfit", "failed", "expired", "crowded"]
"""What is dropped: a message that is none, a connection with a wrong secret or without one, a row
with a token or a state that is not the model's, a row for which the model raised, a request whose
time was over, one of a client that has too much waiting."""


@dataclass(slots=True, kw_only=True)
class ServerCounters:
    """What has happened since the start; may be read from any thread.

    Attributes:
        num_requests: requests for drafts that arrived whole.
        num_rows: their rows.
        num_feed_calls: turns in which texts were only brought up to date.
        num_refused: what was dropped, by reason.
        compute_s: time in the model, in seconds.
    """

    num_requests: int = 0
    num_rows: int = 0
    num_feed_calls: int = 0
    num_refused: dict[Refused, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(Refused), 0)
    )
    compute_s: float = 0.0

    def totals(self) -> Iterator[tuple[MetricSpec, tuple[str, ...], float]]:
        """Of each exported series: metric, values of its labels behind the drafter's, and value."""
        yield DRAFTER_ROWS, (), self.num_rows
        yield DRAFTER_COMPUTE, (), self.compute_s
        for reason, number in self.num_refused.items():
            yield DRAFTER_REFUSED, (reason,), number


class CounterExporter:
    """Feeds Ray's metrics from a drafter's counters, once a second, in a thread of its own.

    Args:
        counters: of the drafter's server.
        source: the drafter's kind.
        drafter: its name.
    """

    def __init__(self, counters: ServerCounters, source: str, drafter: str) -> None:
        from ray.util.metrics import Counter  # a server that no actor holds needs no Ray

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
