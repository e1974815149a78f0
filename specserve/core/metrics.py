"""Every metric of speculation: declared once, counted in plain Python, exported from snapshots.

The decoding loop only adds to integers. A :class:`SpeculationSnapshot` travels from rank 0 to the
replica, where exporters turn it into series: Prometheus' own client wants totals
(:func:`samples` of the snapshot), Ray's metrics want increments (:func:`samples` of
:meth:`SpeculationSnapshot.since`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import msgspec

from specserve.core.config import MAX_DRAFT_TOKENS

LATENCY_BUCKETS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
"""Upper bounds of ``specserve_draft_latency_seconds``, in seconds; the last bucket is open."""

LENGTH_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)
"""Upper bounds of ``specserve_accepted_length``, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric as the outside sees it.

    Attributes:
        name: full name, counters with their ``_total``.
        kind: Prometheus' type.
        unit: of the value.
        labels: names of the labels besides the exporter's own (``model``).
        description: one sentence, shown as the metric's help.
        promql: the question it usually answers.
        buckets: upper bounds of a histogram's buckets, without the open one.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    description: str
    promql: str
    buckets: tuple[float, ...] = ()


DRAFTS = MetricSpec(
    name="specserve_drafts_total",
    kind="counter",
    unit="drafts",
    labels=("source",),
    description="Drafts that the target verified.",
    promql="sum by (source) (rate(specserve_drafts_total[1m]))",
)
DRAFT_TOKENS = MetricSpec(
    name="specserve_draft_tokens_total",
    kind="counter",
    unit="tokens",
    labels=("source",),
    description="Draft tokens that the target verified.",
    promql="sum by (source) (rate(specserve_draft_tokens_total[1m]))",
)
ACCEPTED_TOKENS = MetricSpec(
    name="specserve_accepted_tokens_total",
    kind="counter",
    unit="tokens",
    labels=("source",),
    description="Draft tokens that the target accepted.",
    promql="sum by (source) (rate(specserve_accepted_tokens_total[1m]))"
    " / sum by (source) (rate(specserve_draft_tokens_total[1m]))",
)
ACCEPTED_LENGTH = MetricSpec(
    name="specserve_accepted_length",
    kind="histogram",
    unit="tokens",
    labels=("source",),
    description="Accepted tokens of a draft.",
    promql="histogram_quantile(0.5, sum by (source, le)"
    " (rate(specserve_accepted_length_bucket[5m])))",
    buckets=LENGTH_BUCKETS,
)
DRAFTED_AT_POSITION = MetricSpec(
    name="specserve_drafted_at_position_total",
    kind="counter",
    unit="tokens",
    labels=("source", "position"),
    description="Drafts that had a token at this position, counted from 1.",
    promql="sum by (source, position) (rate(specserve_drafted_at_position_total[5m]))",
)
ACCEPTED_AT_POSITION = MetricSpec(
    name="specserve_accepted_at_position_total",
    kind="counter",
    unit="tokens",
    labels=("source", "position"),
    description="Drafts whose token at this position, counted from 1, was accepted.",
    promql="sum by (source, position) (rate(specserve_accepted_at_position_total[5m]))"
    " / sum by (source, position) (rate(specserve_drafted_at_position_total[5m]))",
)
DRAFT_LATENCY = MetricSpec(
    name="specserve_draft_latency_seconds",
    kind="histogram",
    unit="seconds",
    labels=("source",),
    description="Time a source took to answer for one batch.",
    promql="histogram_quantile(0.99, sum by (source, le)"
    " (rate(specserve_draft_latency_seconds_bucket[5m])))",
    buckets=LATENCY_BUCKETS_S,
)
DRAFTER_UP = MetricSpec(
    name="specserve_drafter_up",
    kind="gauge",
    unit="bool",
    labels=("source",),
    description="1 while the source is asked for drafts, 0 while it is switched off.",
    promql="min by (source) (specserve_drafter_up) < 1",
)
DRAFTER_TIMEOUTS = MetricSpec(
    name="specserve_drafter_timeouts_total",
    kind="counter",
    unit="calls",
    labels=("source",),
    description="Calls to a source that missed their deadline.",
    promql="sum by (source) (rate(specserve_drafter_timeouts_total[5m]))",
)
DRAFTER_ERRORS = MetricSpec(
    name="specserve_drafter_errors_total",
    kind="counter",
    unit="errors",
    labels=("source",),
    description="Calls to a source that raised, and drafts dropped because they were malformed.",
    promql="sum by (source) (rate(specserve_drafter_errors_total[5m]))",
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
)
"""All metrics of this project."""


class AcceptanceSnapshot(msgspec.Struct, frozen=True):
    """Verified drafts of one source, since the start.

    Attributes:
        source: who drafted.
        drafted: ``drafted[k]`` drafts had k tokens; up to the longest draft seen.
        accepted: ``accepted[k]`` drafts had their first k tokens accepted, and no more; as long
            as ``drafted``.
    """

    source: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def num_drafts(self) -> int:
        """Verified drafts."""
        return sum(self.drafted)

    @property
    def num_draft_tokens(self) -> int:
        """Verified draft tokens."""
        return sum(k * count for k, count in enumerate(self.drafted))

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted draft tokens."""
        return sum(k * count for k, count in enumerate(self.accepted))

    @property
    def drafted_at_position(self) -> tuple[int, ...]:
        """Drafts that had a token at position 1, 2, ..."""
        return _at_least(self.drafted)

    @property
    def accepted_at_position(self) -> tuple[int, ...]:
        """Drafts whose token at position 1, 2, ... was accepted."""
        return _at_least(self.accepted)


class HealthSnapshot(msgspec.Struct, frozen=True):
    """Calls to one kind of source, since the start.

    Attributes:
        source: the kind, as configured.
        up: whether it is being asked.
        num_errors: calls that raised and drafts that were malformed.
        num_timeouts: calls that missed their deadline.
        latency: calls by duration, one count a bucket of ``LATENCY_BUCKETS_S`` and an open one.
        latency_sum_s: duration of all calls, in seconds.
    """

    source: str
    up: bool
    num_errors: int
    num_timeouts: int
    latency: tuple[int, ...]
    latency_sum_s: float


class SpeculationSnapshot(msgspec.Struct, frozen=True):
    """State of all counters at one moment; small, and serialisable by msgspec."""

    acceptance: tuple[AcceptanceSnapshot, ...] = ()
    health: tuple[HealthSnapshot, ...] = ()

    def since(self, earlier: SpeculationSnapshot) -> SpeculationSnapshot:
        """What was counted after ``earlier``; ``up`` is this snapshot's.

        A counter below its earlier value means that the process behind it is a new one: then
        everything that this snapshot holds came after.
        """
        before = {entry.source: entry for entry in earlier.acceptance}
        calls_before = {entry.source: entry for entry in earlier.health}
        return SpeculationSnapshot(
            tuple(_acceptance_since(now, before.get(now.source)) for now in self.acceptance),
            tuple(_health_since(now, calls_before.get(now.source)) for now in self.health),
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One series' value.

    Attributes:
        spec: which metric.
        labels: values of ``spec.labels``, in their order.
        value: of a counter or gauge; the sum of all observations of a histogram.
        bins: of a histogram, (typical value, observations) for each non-empty bin. Within a
            bucket of latencies the typical value is its upper bound.
    """

    spec: MetricSpec
    labels: tuple[str, ...]
    value: float
    bins: tuple[tuple[float, int], ...] = ()


def samples(snapshot: SpeculationSnapshot) -> Iterator[Sample]:
    """All series of a snapshot, or of the difference of two."""
    for entry in snapshot.acceptance:
        source = (entry.source,)
        yield Sample(DRAFTS, source, entry.num_drafts)
        yield Sample(DRAFT_TOKENS, source, entry.num_draft_tokens)
        yield Sample(ACCEPTED_TOKENS, source, entry.num_accepted_tokens)
        lengths = tuple((float(k), count) for k, count in enumerate(entry.accepted) if count)
        yield Sample(ACCEPTED_LENGTH, source, entry.num_accepted_tokens, lengths)
        for position, count in enumerate(entry.drafted_at_position, start=1):
            yield Sample(DRAFTED_AT_POSITION, (entry.source, str(position)), count)
        for position, count in enumerate(entry.accepted_at_position, start=1):
            yield Sample(ACCEPTED_AT_POSITION, (entry.source, str(position)), count)
    for calls in snapshot.health:
        source = (calls.source,)
        bounds = (*LATENCY_BUCKETS_S, 2 * LATENCY_BUCKETS_S[-1])
        bins = tuple((le, n) for le, n in zip(bounds, calls.latency, strict=True) if n)
        yield Sample(DRAFT_LATENCY, source, calls.latency_sum_s, bins)
        yield Sample(DRAFTER_UP, source, float(calls.up))
        yield Sample(DRAFTER_TIMEOUTS, source, calls.num_timeouts)
        yield Sample(DRAFTER_ERRORS, source, calls.num_errors)


class SpeculationMetrics:
    """The counters of one process. Updates are a few integer additions, from one thread.

    Args:
        kinds: kinds of the configured sources; they are shown before they are first asked.
    """

    def __init__(self, kinds: tuple[str, ...] = ()) -> None:
        self._acceptance: dict[str, _Acceptance] = {}
        self._health: dict[str, _Health] = {kind: _Health() for kind in kinds}

    def count_draft(self, source: str, num_drafted: int, num_accepted: int) -> None:
        """One draft was verified: ``0 <= num_accepted <= num_drafted <= MAX_DRAFT_TOKENS``."""
        counts = self._acceptance.get(source)
        if counts is None:
            counts = self._acceptance[source] = _Acceptance()
        counts.longest = max(counts.longest, num_drafted)
        counts.drafted[num_drafted] += 1
        counts.accepted[num_accepted] += 1

    def count_call(self, kind: str, seconds: float) -> None:
        """A source answered for one batch."""
        health = self._of(kind)
        health.latency[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        health.latency_sum_s += seconds

    def count_error(self, kind: str) -> None:
        """A source raised, or one of its drafts was malformed."""
        self._of(kind).num_errors += 1

    def count_timeout(self, kind: str) -> None:
        """A call to a source missed its deadline."""
        self._of(kind).num_timeouts += 1

    def set_up(self, kind: str, up: bool) -> None:
        """A source is being asked from now on, or is switched off."""
        self._of(kind).up = up

    def snapshot(self) -> SpeculationSnapshot:
        """The state now; costs some microseconds, meant for once a second or on request.

        May be called from another thread: what is counted meanwhile may be missing.
        """
        return SpeculationSnapshot(
            tuple(
                AcceptanceSnapshot(
                    source,
                    tuple(counts.drafted[: counts.longest + 1]),
                    tuple(counts.accepted[: counts.longest + 1]),
                )
                for source, counts in list(self._acceptance.items())
            ),
            tuple(
                HealthSnapshot(
                    kind,
                    health.up,
                    health.num_errors,
                    health.num_timeouts,
                    tuple(health.latency),
                    health.latency_sum_s,
                )
                for kind, health in list(self._health.items())
            ),
        )

    def _of(self, kind: str) -> _Health:
        health = self._health.get(kind)
        if health is None:
            health = self._health[kind] = _Health()
        return health


class _Acceptance:
    __slots__ = ("accepted", "drafted", "longest")

    def __init__(self) -> None:
        self.longest = 0
        self.drafted = [0] * (MAX_DRAFT_TOKENS + 1)
        self.accepted = [0] * (MAX_DRAFT_TOKENS + 1)


class _Health:
    __slots__ = ("latency", "latency_sum_s", "num_errors", "num_timeouts", "up")

    def __init__(self) -> None:
        self.up = True
        self.num_errors = 0
        self.num_timeouts = 0
        self.latency = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self.latency_sum_s = 0.0


def _at_least(counts: tuple[int, ...]) -> tuple[int, ...]:
    """``[sum(counts[1:]), sum(counts[2:]), ...]``."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]


def _minus(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    padded = before + (0,) * (len(now) - len(before))
    return tuple(a - b for a, b in zip(now, padded, strict=True))


def _acceptance_since(
    now: AcceptanceSnapshot, before: AcceptanceSnapshot | None
) -> AcceptanceSnapshot:
    if before is None or now.num_drafts < before.num_drafts:
        return now
    return AcceptanceSnapshot(
        now.source, _minus(now.drafted, before.drafted), _minus(now.accepted, before.accepted)
    )


def _health_since(now: HealthSnapshot, before: HealthSnapshot | None) -> HealthSnapshot:
    if before is None or sum(now.latency) < sum(before.latency):
        return now
    return HealthSnapshot(
        now.source,
        now.up,
        max(now.num_errors - before.num_errors, 0),
        max(now.num_timeouts - before.num_timeouts, 0),
        _minus(now.latency, before.latency),
        max(now.latency_sum_s - before.latency_sum_s, 0.0),
    )
