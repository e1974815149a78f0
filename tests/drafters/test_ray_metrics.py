from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.util.metrics import Counter, Gauge, Histogram

from specserve.core.metric_specs import (
    ACCEPTED_LENGTH,
    DRAFTER_REFUSED,
    DRAFTER_ROWS,
    OF_DRAFTERS,
    TRIE_INGESTED,
    TRIE_TOKENS,
    MetricSpec,
)
from specserve.core.samples import Sample
from specserve.drafters.counters import ServerCounters
from specserve.drafters.ray_metrics import RayExporter

Exports = list[tuple[str, dict[str, str], float]]


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Exports:
    """Values that Ray's metrics receive: name, labels and value."""
    calls: Exports = []

    def record(self: Counter, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        calls.append((self.info["name"], dict(tags or {}), value))

    monkeypatch.setattr(Counter, "inc", record)
    monkeypatch.setattr(Gauge, "set", record)
    monkeypatch.setattr(Histogram, "observe", record)
    return calls


class Totals:
    """An exporter of totals that a test sets."""

    def __init__(self, *specs: MetricSpec) -> None:
        self.samples: list[Sample] = []
        self._exporter = RayExporter(specs, self._read, {"model": "m"})

    def _read(self) -> Iterator[Sample]:
        yield from self.samples

    def export(self, *samples: Sample) -> None:
        self.samples = list(samples)
        self._exporter.export()


def test_each_increment_of_a_counter_is_exported_once(exports: Exports) -> None:
    counters = ServerCounters()
    exporter = RayExporter(OF_DRAFTERS, lambda: counters.samples("mtp", "drafter-0"), {})
    own = {"source": "mtp", "drafter": "drafter-0"}
    exporter.export()
    assert exports == []
    counters.num_rows = 3
    counters.num_refused["malformed"] = 2
    exporter.export()
    counters.num_rows += 4
    exporter.export()
    assert exports == [
        (DRAFTER_ROWS.name, own, 3),
        (DRAFTER_REFUSED.name, {**own, "reason": "malformed"}, 2),
        (DRAFTER_ROWS.name, own, 4),
    ]


def test_a_counter_that_restarts_is_exported_from_zero(exports: Exports) -> None:
    totals = Totals(TRIE_INGESTED)
    for value in (7, 9, 4):
        totals.export(Sample(TRIE_INGESTED, ("a",), value))
    assert [value for _, _, value in exports] == [7, 2, 4]


def test_each_new_observation_is_exported(exports: Exports) -> None:
    totals = Totals(ACCEPTED_LENGTH)
    totals.export(Sample(ACCEPTED_LENGTH, ("ngram",), 4.0, ((2.0, 2),)))
    totals.export(Sample(ACCEPTED_LENGTH, ("ngram",), 11.0, ((2.0, 3), (5.0, 1))))
    assert [value for _, _, value in exports] == [2.0, 2.0, 2.0, 5.0]
    assert exports[0][1] == {"model": "m", "source": "ngram"}


def test_a_gauge_without_a_sample_is_exported_as_0(exports: Exports) -> None:
    totals = Totals(TRIE_TOKENS)
    kept, lost = (Sample(TRIE_TOKENS, (name,), 5) for name in ("kept", "lost"))
    for samples in ((kept, lost), (kept,), (kept,)):
        totals.export(*samples)
    assert [(tags["memory_namespace"], value) for _, tags, value in exports] == [
        ("kept", 5),
        ("lost", 5),
        ("kept", 5),
        ("lost", 0.0),
        ("kept", 5),
    ]
