"""The metrics of a snapshot for ``prometheus_client``: one collector, no state of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from specserve.core.metric_specs import ALL, MetricSpec
from specserve.core.metrics import SpeculationSnapshot
from specserve.core.samples import Sample, samples


class PrometheusCollector(Collector):
    """Shows a snapshot as Prometheus series; register it with a ``CollectorRegistry``.

    Args:
        get_snapshot: called at each scrape, from the scraping thread.
        labels: labels of all series besides their own, such as the model's name.
    """

    def __init__(
        self, get_snapshot: Callable[[], SpeculationSnapshot], labels: Mapping[str, str]
    ) -> None:
        self._get_snapshot = get_snapshot
        self._labels = dict(labels)

    def describe(self) -> Iterator[Metric]:
        """All families without samples: registering must not take a snapshot."""
        for spec in ALL:
            yield _family(spec, (*self._labels, *spec.labels))

    def collect(self) -> Iterator[Metric]:
        """All families with the samples of now."""
        families = {spec.name: _family(spec, (*self._labels, *spec.labels)) for spec in ALL}
        for sample in samples(self._get_snapshot()):
            _add(families[sample.spec.name], sample, [*self._labels.values(), *sample.labels])
        yield from families.values()


def _family(spec: MetricSpec, labels: tuple[str, ...]) -> Metric:
    if spec.kind == "counter":
        # prometheus_client appends the suffix itself.
        name = spec.name.removesuffix("_total")
        return CounterMetricFamily(name, spec.description, labels=labels)
    if spec.kind == "gauge":
        return GaugeMetricFamily(spec.name, spec.description, labels=labels)
    return HistogramMetricFamily(spec.name, spec.description, labels=labels)


def _add(family: Metric, sample: Sample, labels: list[str]) -> None:
    if isinstance(family, HistogramMetricFamily):
        family.add_metric(labels, _buckets(sample), sum_value=sample.value)
    elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
        family.add_metric(labels, sample.value)


def _buckets(sample: Sample) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus has them."""
    bounds = sample.spec.buckets
    counts = [0] * (len(bounds) + 1)
    for value, count in sample.bins:
        counts[bisect_left(bounds, value)] += count
    total = 0
    buckets = []
    for name, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        total += count
        buckets.append((name, float(total)))
    return buckets
