from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from specserve.core.metric_specs import (
    ALL,
    DRAFTER_UP,
    LATENCY_BUCKETS_S,
    OF_DRAFTERS,
    MetricSpec,
)
from specserve.core.metrics import SpeculationMetrics, SpeculationSnapshot
from specserve.core.samples import samples
from tests.counts import count_draft

DRAFTS = st.lists(
    st.integers(1, 128).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=30
)


def counted(drafts: list[tuple[int, int]]) -> SpeculationMetrics:
    metrics = SpeculationMetrics(("ngram",))
    for num_drafted, num_accepted in drafts:
        count_draft(metrics, "ngram", num_drafted, num_accepted)
    return metrics


def values(snapshot: SpeculationSnapshot, spec: MetricSpec) -> dict[tuple[str, ...], float]:
    return {sample.labels: sample.value for sample in samples(snapshot) if sample.spec is spec}


def by_name(name: str) -> MetricSpec:
    return next(spec for spec in ALL if spec.name == name)


def test_every_metric_has_a_unique_name_and_a_description() -> None:
    declared = (*ALL, *OF_DRAFTERS)
    assert len({spec.name for spec in declared}) == len(declared)
    for spec in declared:
        assert spec.name.startswith("specserve_")
        assert spec.description.endswith(".")


def test_drafts_and_tokens_are_counted_by_source() -> None:
    metrics = SpeculationMetrics()
    count_draft(metrics, "ngram", 5, 2)
    count_draft(metrics, "ngram", 3, 0)
    count_draft(metrics, "mtp", 1, 1)
    snapshot = metrics.snapshot()
    assert values(snapshot, by_name("specserve_drafts_total")) == {("ngram",): 2, ("mtp",): 1}
    assert values(snapshot, by_name("specserve_draft_tokens_total")) == {
        ("ngram",): 8,
        ("mtp",): 1,
    }
    assert values(snapshot, by_name("specserve_accepted_tokens_total")) == {
        ("ngram",): 2,
        ("mtp",): 1,
    }


def test_positions_count_from_one_and_show_zero_if_never_accepted() -> None:
    snapshot = counted([(3, 1), (2, 2), (3, 0)]).snapshot()
    assert values(snapshot, by_name("specserve_drafted_at_position_total")) == {
        ("ngram", "1"): 3,
        ("ngram", "2"): 3,
        ("ngram", "3"): 2,
    }
    assert values(snapshot, by_name("specserve_accepted_at_position_total")) == {
        ("ngram", "1"): 2,
        ("ngram", "2"): 1,
        ("ngram", "3"): 0,
    }


@given(DRAFTS)
def test_positions_add_up_to_the_tokens(drafts: list[tuple[int, int]]) -> None:
    for entry in counted(drafts).snapshot().acceptance:
        assert sum(entry.drafted_at_position) == entry.num_draft_tokens
        assert sum(entry.accepted_at_position) == entry.num_accepted_tokens
        assert entry.num_drafts == len(drafts)


def test_a_call_falls_into_the_bucket_whose_bound_it_does_not_exceed() -> None:
    metrics = SpeculationMetrics()
    for seconds in (LATENCY_BUCKETS_S[0], LATENCY_BUCKETS_S[0] * 1.01, 5.0):
        metrics.count_call("ngram", seconds)
    latency = metrics.snapshot().health[0].latency
    assert (latency[0], latency[1], latency[-1]) == (1, 1, 1)


def test_a_configured_source_is_up_and_without_errors_before_it_is_asked() -> None:
    snapshot = SpeculationMetrics(("ngram", "mtp")).snapshot()
    assert values(snapshot, DRAFTER_UP) == {("ngram",): 1.0, ("mtp",): 1.0}
    assert values(snapshot, by_name("specserve_drafter_errors_total")) == {
        ("ngram",): 0,
        ("mtp",): 0,
    }


def test_the_gauge_has_the_last_value_and_counters_add_up() -> None:
    metrics = SpeculationMetrics(("mtp",))
    metrics.set_up("mtp", False)
    metrics.count_error("mtp")
    metrics.count_timeout("mtp")
    metrics.count_timeout("mtp")
    for _ in range(3):
        metrics.count_partial_text("mtp")
    health = metrics.snapshot().health[0]
    assert (health.up, health.num_errors, health.num_timeouts) == (False, 1, 2)
    assert health.num_partial_texts == 3


def test_a_source_is_up_if_it_is_enabled_and_reachable() -> None:
    metrics = SpeculationMetrics(("mtp",))
    shown = []
    for up, reachable in ((True, True), (False, True), (True, False), (False, False)):
        metrics.set_up("mtp", up, "" if up else "off")
        metrics.set_reachable("mtp", reachable, "" if reachable else "away")
        health = metrics.snapshot().health[0]
        shown.append((health.up, health.reason))
    assert shown == [(True, ""), (False, "off"), (False, "away"), (False, "off")]


def test_since_gives_the_counts_after_a_snapshot() -> None:
    metrics = counted([(3, 1)])
    (before,) = metrics.snapshot().acceptance
    count_draft(metrics, "ngram", 4, 4)
    (now,) = metrics.snapshot().acceptance
    assert now.since(before).drafted_at_position == (1, 1, 1, 1)
    assert now.since(before).accepted_at_position == (1, 1, 1, 1)
    assert now.since(None) == now


def test_a_snapshot_can_be_encoded_and_decoded() -> None:
    metrics = counted([(8, 3)])
    metrics.count_call("ngram", 2e-5)
    snapshot = metrics.snapshot()
    wire = msgspec.msgpack.encode(snapshot)
    assert msgspec.msgpack.decode(wire, type=SpeculationSnapshot) == snapshot
