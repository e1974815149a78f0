"""Every metric of speculation, declared once: name, labels and help."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

LATENCY_BUCKETS_S = (
    *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2),
    *(0.1, 0.2, 0.5, 1.0),
)
"""Upper bounds of ``specserve_draft_latency_seconds``, in seconds; the last bucket is open."""

LENGTH_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)
"""Upper bounds of ``specserve_accepted_length``, in tokens."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One exported metric.

    Attributes:
        name: full name, for counters with ``_total``.
        description: one sentence, shown as the metric's help.
        labels: names of the labels besides the exporter's own (``model``).
        buckets: upper bounds of a histogram's buckets, without the open one.
    """

    name: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """Prometheus' type, which follows from the name and the buckets."""
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


_of_source = partial(MetricSpec, labels=("source",))
_of_position = partial(MetricSpec, labels=("source", "position"))
_of_namespace = partial(MetricSpec, labels=("memory_namespace",))
_of_drafter = partial(MetricSpec, labels=("source", "drafter"))

DRAFTS = _of_source("specserve_drafts_total", "Drafts that the target verified.")
DRAFT_TOKENS = _of_source("specserve_draft_tokens_total", "Draft tokens that the target verified.")
ACCEPTED_TOKENS = _of_source(
    "specserve_accepted_tokens_total", "Draft tokens that the target accepted."
)
ACCEPTED_LENGTH = _of_source(
    "specserve_accepted_length", "Accepted tokens of a draft.", buckets=LENGTH_BUCKETS
)
DRAFTED_AT_POSITION = _of_position(
    "specserve_drafted_at_position_total",
    "Drafts that had a token at this position, counted from 1.",
)
ACCEPTED_AT_POSITION = _of_position(
    "specserve_accepted_at_position_total",
    "Drafts whose token at this position, counted from 1, was accepted.",
)
DRAFT_LATENCY = _of_source(
    "specserve_draft_latency_seconds",
    "Time a source took to draft for a batch, where it was asked to.",
    buckets=LATENCY_BUCKETS_S,
)
DRAFTER_UP = _of_source(
    "specserve_drafter_up",
    "1 while the source can be asked for drafts, 0 while it is switched off or unreachable.",
)
DRAFTER_TIMEOUTS = _of_source(
    "specserve_drafter_timeouts_total", "Calls to a source that missed their deadline."
)
DRAFTER_ERRORS = _of_source(
    "specserve_drafter_errors_total",
    "Calls to a source that raised or were refused, and answers that were malformed.",
)
DRAFTER_PARTIAL_TEXTS = _of_source(
    "specserve_drafter_partial_texts_total",
    "Requests whose drafter lacks the beginning of the text and drafts from the rest,"
    " mostly because the model took the beginning from its prefix cache.",
)

TRIE_TOKENS = _of_namespace("specserve_trie_tokens", "Tokens that a replica's draft memory holds.")
TRIE_BYTES = _of_namespace("specserve_trie_bytes", "Bytes reserved for a namespace, used or not.")
TRIE_INGESTED = _of_namespace(
    "specserve_trie_ingested_tokens_total", "Tokens that a replica's draft memory has learned."
)
TRIE_EVICTED = _of_namespace("specserve_trie_evicted_total", "Tokens evicted for lack of memory.")
TRIE_STORE_UP = MetricSpec(
    "specserve_trie_store_up", "1 while the cluster's draft memory answers this replica."
)
TRIE_LAG = MetricSpec(
    "specserve_trie_replication_lag_seconds",
    "Age of the oldest token in transit from or to this replica.",
)
TRIE_RECEIVED = MetricSpec(
    "specserve_trie_received_tokens_total", "Tokens that this replica received from others."
)
TRIE_DROPPED = MetricSpec(
    "specserve_trie_dropped_tokens_total",
    "Own tokens that no other replica receives, because the store was unreachable for too long.",
)

DRAFTER_ROWS = _of_drafter(
    "specserve_drafter_rows_total",
    "Texts that a drafter received to remember or to draft for, one per request and step.",
)
DRAFTER_COMPUTE = _of_drafter(
    "specserve_drafter_compute_seconds_total", "Time that a drafter's model computed."
)
DRAFTER_REFUSED = MetricSpec(
    "specserve_drafter_refused_total",
    "What a drafter dropped: malformed messages, unauthorized connections, expired and"
    " crowded requests, unfit rows, and rows for which its model failed.",
    labels=("source", "drafter", "reason"),
)

ALL: tuple[MetricSpec, ...] = (
    DRAFTS,
    DRAFT_TOKENS,
    ACCEPTED_TOKENS,
    ACCEPTED_LENGTH,
    DRAFTED_AT_POSITION,
    ACCEPTED_AT_POSITION,
    DRAFT_LATENCY,
    DRAFTER_UP,
    DRAFTER_TIMEOUTS,
    DRAFTER_ERRORS,
    DRAFTER_PARTIAL_TEXTS,
    TRIE_TOKENS,
    TRIE_BYTES,
    TRIE_INGESTED,
    TRIE_EVICTED,
    TRIE_STORE_UP,
    TRIE_LAG,
    TRIE_RECEIVED,
    TRIE_DROPPED,
)
"""Metrics that a replica exports, at its ``/metrics`` and through Ray."""

OF_DRAFTERS = (DRAFTER_ROWS, DRAFTER_COMPUTE, DRAFTER_REFUSED)
"""Metrics that a drafter itself exports, only through Ray and without the label ``model``."""
