"""Exports the speculation metrics through Ray, which adds the prefix ``ray_`` and scrapes nodes."""

from __future__ import annotations

import logging
import threading

from ray.util.metrics import Counter, Gauge, Histogram, Metric

from specserve.core.metric_specs import ALL, MetricSpec
from specserve.core.metrics import SpeculationMetrics, SpeculationSnapshot
from specserve.core.samples import Sample, samples

logger = logging.getLogger(__name__)

EXPORT_INTERVAL_S = 1.0


class RayMetricsExporter:
    """Feeds Ray's metrics from a process's counters, once a second, in a thread of its own.

    Args:
        metrics: the counters; read while the decoding thread writes them, which costs at most a
            count that appears a second later.
        model: value of the label ``model``.
    """

    def __init__(self, metrics: SpeculationMetrics, model: str) -> None:
        self._metrics = metrics
        self._exported = SpeculationSnapshot()
        self._series = {spec.name: _series(spec, model) for spec in ALL}
        self._thread = threading.Thread(target=self._run, name="specserve-metrics", daemon=True)

    def start(self) -> None:
        """Begins to export, until the process ends."""
        self._thread.start()

    def export(self) -> None:
        """Exports what was counted since the last call."""
        snapshot, earlier = self._metrics.snapshot(), self._exported
        self._exported = snapshot  # first: what fails now is lost, and nothing is counted twice
        for sample in samples(snapshot.since(earlier)):
            self._record(sample)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self.export()
            except Exception:
                logger.exception("Speculation metrics could not be exported")
            pause.wait(EXPORT_INTERVAL_S)

    def _record(self, sample: Sample) -> None:
        series = self._series[sample.spec.name]
        tags = dict(zip(sample.spec.labels, sample.labels, strict=True))
        if isinstance(series, Counter):
            if sample.value > 0:
                series.inc(sample.value, tags=tags)
        elif isinstance(series, Gauge):
            series.set(sample.value, tags=tags)
        elif isinstance(series, Histogram):
            for value, count in sample.bins:
                for _ in range(count):
                    series.observe(value, tags=tags)


def _series(spec: MetricSpec, model: str) -> Metric:
    keys = ("model", *spec.labels)
    series: Metric
    if spec.kind == "counter":
        series = Counter(spec.name, spec.description, tag_keys=keys)
    elif spec.kind == "gauge":
        series = Gauge(spec.name, spec.description, tag_keys=keys)
    else:
        # Ray refuses a bucket that ends at 0; with none, 0 lies in the first one.
        boundaries = [bound for bound in spec.buckets if bound > 0]
        series = Histogram(spec.name, spec.description, boundaries=boundaries, tag_keys=keys)
    series.set_default_tags({"model": model})
    return series
