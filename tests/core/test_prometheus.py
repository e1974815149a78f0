from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from specserve.core.metric_specs import ALL
from specserve.core.metrics import (
    LinkSnapshot,
    NamespaceSnapshot,
    SpeculationMetrics,
    TrieSnapshot,
)
from specserve.core.prometheus import PrometheusCollector
from tests.counts import count_draft


def registry_of(metrics: SpeculationMetrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(metrics.snapshot, {"model": "demo"}))
    return registry


def test_every_metric_appears_under_its_declared_name() -> None:
    metrics = SpeculationMetrics(("ngram",))
    count_draft(metrics, "ngram", 4, 2)
    namespaces = (NamespaceSnapshot("n", 10, 650, 20, 10),)
    metrics.watch_trie(lambda: TrieSnapshot(namespaces, LinkSnapshot(True, 0.5, 7, 0)))
    text = generate_latest(registry_of(metrics)).decode()
    for spec in ALL:
        assert f"\n{spec.name}{'_bucket' if spec.kind == 'histogram' else ''}{{" in text
    assert "_total_total" not in text
    assert len(list(text_string_to_metric_families(text))) == len(ALL)


def test_values_are_read_at_the_scrape() -> None:
    metrics = SpeculationMetrics(("ngram",))
    registry = registry_of(metrics)
    labels = {"model": "demo", "source": "ngram"}
    assert registry.get_sample_value("specserve_drafts_total", labels) is None
    count_draft(metrics, "ngram", 4, 2)
    count_draft(metrics, "ngram", 4, 3)
    assert registry.get_sample_value("specserve_drafts_total", labels) == 2
    assert registry.get_sample_value("specserve_accepted_tokens_total", labels) == 5
    at_three = labels | {"position": "3"}
    assert registry.get_sample_value("specserve_accepted_at_position_total", at_three) == 1
    metrics.set_up("ngram", False)
    assert registry.get_sample_value("specserve_drafter_up", labels) == 0


def test_a_histogram_is_cumulative_with_its_sum_and_count() -> None:
    metrics = SpeculationMetrics()
    for num_accepted in (0, 2, 2, 7, 100):
        count_draft(metrics, "ngram", 128, num_accepted)
    registry = registry_of(metrics)
    labels = {"model": "demo", "source": "ngram"}

    def at_most(bound: str) -> float | None:
        name = "specserve_accepted_length_bucket"
        return registry.get_sample_value(name, labels | {"le": bound})

    assert [at_most(bound) for bound in ("0.0", "1.0", "2.0", "8.0", "64.0", "128.0", "+Inf")] == [
        1,
        1,
        3,
        4,
        4,
        5,
        5,
    ]
    assert registry.get_sample_value("specserve_accepted_length_sum", labels) == 111
    assert registry.get_sample_value("specserve_accepted_length_count", labels) == 5
