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

Told = list[tuple[str, dict[str, str], float]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What Ray's series are told: name, labels and value."""
    calls: Told = []

    def tell(self: Counter, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        calls.append((self.info["name"], dict(tags or {}), value))

    monkeypatch.setattr(Counter, "inc", tell)
    monkeypatch.setattr(Gauge, "set", tell)
    monkeypatch.setattr(Histogram, "observe", tell)
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


def test_what_a_drafter_has_counted_since_is_exported_once(told: Told) -> None:
    counters = ServerCounters()
    exporter = RayExporter(OF_DRAFTERS, lambda: counters.samples("mtp", "drafter-0"), {})
    own = {"source": "mtp", "drafter": "drafter-0"}
    exporter.export()
    assert told == []
    counters.num_rows = 3
    counters.num_refused["malformed"] = 2
    exporter.export()
    counters.num_rows += 4
    exporter.export()
    assert told == [
        (DRAFTER_ROWS.name, own, 3),
        (DRAFTER_REFUSED.name, {**own, "reason": "malformed"}, 2),
        (DRAFTER_ROWS.name, own, 4),
    ]


def test_a_counter_that_begins_anew_is_counted_from_there(told: Told) -> None:
    totals = Totals(TRIE_INGESTED)
    for value in (7, 9, 4):
        totals.export(Sample(TRIE_INGESTED, ("a",), value))
    assert [value for _, _, value in told] == [7, 2, 4]


def test_a_histogram_is_told_each_new_observation(told: Told) -> None:
    totals = Totals(ACCEPTED_LENGTH)
    totals.export(Sample(ACCEPTED_LENGTH, ("ngram",), 4.0, ((2.0, 2),)))
    totals.export(Sample(ACCEPTED_LENGTH, ("ngram",), 11.0, ((2.0, 3), (5.0, 1))))
    assert [value for _, _, value in told] == [2.0, 2.0, 2.0, 5.0]
    assert told[0][1] == {"model": "m", "source": "ngram"}


def test_a_gauge_that_is_told_no_longer_is_0_from_then_on(told: Told) -> None:
    totals = Totals(TRIE_TOKENS)
    kept, lost = (Sample(TRIE_TOKENS, (name,), 5) for name in ("kept", "lost"))
    for samples in ((kept, lost), (kept,), (kept,)):
        totals.export(*samples)
    assert [(tags["namespace"], value) for _, tags, value in told] == [
        ("kept", 5),
        ("lost", 5),
        ("kept", 5),
        ("lost", 0.0),
        ("kept", 5),
    ]
