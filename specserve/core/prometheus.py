"""Exports a snapshot's metrics through ``prometheus_client``, by a stateless collector."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from specserve.core.metric_specs import ALL
from specserve.core.metrics import SpeculationSnapshot
from specserve.core.samples import Sample, samples

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_FAMILIES: dict[str, type[_Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class PrometheusCollector(Collector):
    """Exports a snapshot as Prometheus series; register it with a ``CollectorRegistry``.

    ``get_snapshot`` is called at each scrape, from the scraping thread. ``labels``, such as the
    model's name, are added to all series.
    """

    def __init__(
        self, get_snapshot: Callable[[], SpeculationSnapshot], labels: Mapping[str, str]
    ) -> None:
        self._get_snapshot = get_snapshot
        self._labels = dict(labels)

    def collect(self) -> Iterable[Metric]:
        """All families with their current samples."""
        families = self._families()
        for sample in samples(self._get_snapshot()):
            family, labels = families[sample.spec.name], [*self._labels.values(), *sample.labels]
            if isinstance(family, HistogramMetricFamily):
                family.add_metric(labels, _buckets(sample), sum_value=sample.value)
            else:
                family.add_metric(labels, sample.value)
        return families.values()

    def _families(self) -> dict[str, _Family]:
        return {
            spec.name: _FAMILIES[spec.kind](
                spec.name, spec.description, labels=(*self._labels, *spec.labels)
            )
            for spec in ALL
        }


def _buckets(sample: Sample) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, in Prometheus' format."""
    bounds = sample.spec.buckets
    counts = [0.0] * (len(bounds) + 1)
    for value, count in sample.bins:
        counts[bisect_left(bounds, value)] += count
    return list(zip([*map(str, bounds), "+Inf"], accumulate(counts), strict=True))
