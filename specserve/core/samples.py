"""Converts a snapshot to series, which both exporters pass to their metrics client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specserve.core import metric_specs as specs
from specserve.core.metric_specs import LATENCY_BUCKETS_S, MetricSpec
from specserve.core.metrics import SpeculationSnapshot, TrieSnapshot


@dataclass(frozen=True, slots=True)
class Sample:
    """One series' value.

    Attributes:
        spec: the metric.
        labels: values of ``spec.labels``, in their order.
        value: of a counter or gauge; the sum of all observations of a histogram.
        bins: of a histogram, (typical value, observations) for each non-empty bin. The typical
            value of a latency bucket is its upper bound.
    """

    spec: MetricSpec
    labels: tuple[str, ...]
    value: float
    bins: tuple[tuple[float, int], ...] = ()


def samples(snapshot: SpeculationSnapshot) -> Iterator[Sample]:
    """All series of a snapshot, or of the difference of two."""
    for entry in snapshot.acceptance:
        source = (entry.source,)
        yield Sample(specs.DRAFTS, source, entry.num_drafts)
        yield Sample(specs.DRAFT_TOKENS, source, entry.num_draft_tokens)
        yield Sample(specs.ACCEPTED_TOKENS, source, entry.num_accepted_tokens)
        lengths = tuple((float(k), count) for k, count in enumerate(entry.accepted) if count)
        yield Sample(specs.ACCEPTED_LENGTH, source, entry.num_accepted_tokens, lengths)
        for position, count in enumerate(entry.drafted_at_position, start=1):
            yield Sample(specs.DRAFTED_AT_POSITION, (entry.source, str(position)), count)
        for position, count in enumerate(entry.accepted_at_position, start=1):
            yield Sample(specs.ACCEPTED_AT_POSITION, (entry.source, str(position)), count)
    for calls in snapshot.health:
        source = (calls.source,)
        bounds = (*LATENCY_BUCKETS_S, 2 * LATENCY_BUCKETS_S[-1])
        bins = tuple((le, n) for le, n in zip(bounds, calls.latency, strict=True) if n)
        yield Sample(specs.DRAFT_LATENCY, source, calls.latency_sum_s, bins)
        yield Sample(specs.DRAFTER_UP, source, float(calls.up))
        yield Sample(specs.DRAFTER_TIMEOUTS, source, calls.num_timeouts)
        yield Sample(specs.DRAFTER_ERRORS, source, calls.num_errors)
        yield Sample(specs.DRAFTER_PARTIAL_TEXTS, source, calls.num_partial_texts)
    if snapshot.trie is not None:
        yield from _trie_samples(snapshot.trie)


def _trie_samples(trie: TrieSnapshot) -> Iterator[Sample]:
    for each in trie.namespaces:
        namespace = (each.namespace,)
        yield Sample(specs.TRIE_TOKENS, namespace, each.num_tokens)
        yield Sample(specs.TRIE_BYTES, namespace, each.num_bytes)
        yield Sample(specs.TRIE_INGESTED, namespace, each.ingested_tokens)
        yield Sample(specs.TRIE_EVICTED, namespace, each.evicted_tokens)
    if (link := trie.link) is not None:
        yield Sample(specs.TRIE_STORE_UP, (), float(link.up))
        yield Sample(specs.TRIE_LAG, (), link.lag_s)
        yield Sample(specs.TRIE_RECEIVED, (), link.received_tokens)
        yield Sample(specs.TRIE_DROPPED, (), link.dropped_tokens)
