"""Exports a process's metrics through Ray, which adds the prefix ``ray_`` to their names."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ray.util.metrics import Counter, Gauge, Histogram, Metric

from specserve.core.metric_specs import MetricSpec
from specserve.core.samples import Sample

logger = logging.getLogger(__name__)

EXPORT_INTERVAL_S = 1.0


class RayExporter:
    """Exports to Ray's metrics once a second, in its own thread.

    Ray's counters and histograms take increments, so each export adds the difference to the
    previous one.

    Args:
        specs: all metrics that ``read`` may return.
        read: returns the current totals; called from the thread.
        labels: labels that all series get besides those of the samples.
    """

    def __init__(
        self,
        specs: Sequence[MetricSpec],
        read: Callable[[], Iterable[Sample]],
        labels: Mapping[str, str],
    ) -> None:
        self._read = read
        self._labels = dict(labels)
        self._series = {spec.name: _series(spec, self._labels) for spec in specs}
        self._exported: dict[tuple[str, tuple[str, ...]], Sample] = {}

    def start(self) -> None:
        """Starts the thread, which exports until the process ends."""
        threading.Thread(target=self._run, name="specserve-metrics", daemon=True).start()

    def export(self) -> None:
        """Exports what was counted since the last call."""
        now = {(sample.spec.name, sample.labels): sample for sample in self._read()}
        # Stored first: an error below loses increments, but counts none twice.
        before, self._exported = self._exported, now
        for key, sample in now.items():
            self._record(sample, before.get(key))
        for key in before.keys() - now.keys():
            gone = before[key]
            if gone.spec.kind == "gauge":  # Ray would keep its last value
                self._series[gone.spec.name].set(0.0, tags=self._tags(gone))

    def _run(self) -> None:
        while True:
            try:
                self.export()
            except Exception:
                logger.exception("The metrics could not be exported")
            time.sleep(EXPORT_INTERVAL_S)

    def _record(self, sample: Sample, before: Sample | None) -> None:
        series, tags = self._series[sample.spec.name], self._tags(sample)
        if isinstance(series, Gauge):
            series.set(sample.value, tags=tags)
        elif isinstance(series, Counter):
            earlier = before.value if before else 0.0
            # A value below the earlier one means that the counter restarted from 0.
            increment = sample.value - (earlier if earlier <= sample.value else 0.0)
            if increment:
                series.inc(increment, tags=tags)
        elif isinstance(series, Histogram):
            observed = dict(before.bins) if before else {}
            for value, count in sample.bins:
                for _ in range(count - observed.get(value, 0)):
                    series.observe(value, tags=tags)

    def _tags(self, sample: Sample) -> dict[str, str]:
        return {**self._labels, **dict(zip(sample.spec.labels, sample.labels, strict=True))}


def _series(spec: MetricSpec, labels: Mapping[str, str]) -> Metric:
    keys = (*labels, *spec.labels)
    if spec.kind == "counter":
        return Counter(spec.name, spec.description, tag_keys=keys)
    if spec.kind == "gauge":
        return Gauge(spec.name, spec.description, tag_keys=keys)
    # Ray refuses the bound 0; without it, the first bucket also counts 0.
    boundaries = [bound for bound in spec.buckets if bound > 0]
    return Histogram(spec.name, spec.description, boundaries=boundaries, tag_keys=keys)
