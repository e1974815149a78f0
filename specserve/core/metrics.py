"""The counters of speculation: counted in the decoding loop, exported from snapshots.

The decoding loop only adds to integers. A :class:`SpeculationSnapshot` travels from rank 0 to the
replica, where exporters turn it into series (:mod:`specserve.core.samples`): Prometheus' own client
wants totals, Ray's metrics want increments (:meth:`SpeculationSnapshot.since`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from specserve.core.metric_specs import LATENCY_BUCKETS_S
from specserve.core.source_config import MAX_DRAFT_TOKENS
from specserve.core.types import Int64Array


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
        up: whether it is being asked, and what it asks itself is there.
        num_errors: calls that raised and drafts that were malformed.
        num_timeouts: calls that missed their deadline.
        num_partial_texts: requests of whose text its drafter lacks the beginning.
        latency: calls by duration, one count a bucket of ``LATENCY_BUCKETS_S`` and an open one.
        latency_sum_s: duration of all calls, in seconds.
        reason: why it is not up, or why it drafts for some requests only, as far as that is known.
    """

    source: str
    up: bool
    num_errors: int
    num_timeouts: int
    num_partial_texts: int
    latency: tuple[int, ...]
    latency_sum_s: float
    reason: str = ""


class NamespaceSnapshot(msgspec.Struct, frozen=True):
    """One namespace's part of a replica's draft memory.

    Attributes:
        namespace: its label, see :func:`specserve.trie.namespaces.label`.
        num_tokens: tokens held.
        num_bytes: memory set apart for it.
        ingested_tokens: tokens learned since the start.
        evicted_tokens: tokens forgotten for want of memory since the start.
    """

    namespace: str
    num_tokens: int
    num_bytes: int
    ingested_tokens: int
    evicted_tokens: int


class LinkSnapshot(msgspec.Struct, frozen=True):
    """A replica's link to the cluster's draft memory.

    Attributes:
        up: whether the store answers.
        lag_s: age of the oldest token on its way, in seconds.
        received_tokens: tokens that came from other replicas since the start.
        dropped_tokens: own tokens that could not be sent since the start.
    """

    up: bool
    lag_s: float
    received_tokens: int
    dropped_tokens: int


class TrieSnapshot(msgspec.Struct, frozen=True):
    """A replica's draft memory; ``link`` is None where it is not shared."""

    namespaces: tuple[NamespaceSnapshot, ...] = ()
    link: LinkSnapshot | None = None


class SpeculationSnapshot(msgspec.Struct, frozen=True):
    """State of all counters at one moment; small, and serialisable by msgspec."""

    acceptance: tuple[AcceptanceSnapshot, ...] = ()
    health: tuple[HealthSnapshot, ...] = ()
    trie: TrieSnapshot | None = None

    def since(self, earlier: SpeculationSnapshot) -> SpeculationSnapshot:
        """What was counted after ``earlier``; ``up`` and ``reason`` are this snapshot's.

        A counter below its earlier value means that the process behind it is a new one: then
        everything that this snapshot holds came after.
        """
        before = {entry.source: entry for entry in earlier.acceptance}
        calls_before = {entry.source: entry for entry in earlier.health}
        return SpeculationSnapshot(
            tuple(_acceptance_since(now, before.get(now.source)) for now in self.acceptance),
            tuple(_health_since(now, calls_before.get(now.source)) for now in self.health),
            _trie_since(self.trie, earlier.trie),
        )


class SpeculationMetrics:
    """The counters of one process. Updates are a few integer additions, from one thread.

    Args:
        kinds: kinds of the configured sources; they are shown before they are first asked.
    """

    def __init__(self, kinds: tuple[str, ...] = ()) -> None:
        self._drafts: dict[str, Int64Array] = {}  # by label, see `draft_counts`
        self._health: dict[str, _Health] = {kind: _Health() for kind in kinds}
        self._look_at_trie: Callable[[], TrieSnapshot] | None = None

    def watch_trie(self, look: Callable[[], TrieSnapshot]) -> None:
        """Has the draft memory's state in every snapshot; ``look`` is called from any thread."""
        self._look_at_trie = look

    def draft_counts(self, labels: Sequence[str]) -> Int64Array:
        """Where verified drafts are counted, by whoever asks for it.

        Args:
            labels: names of drafts, not asked for before.

        Returns:
            int64 ``[len(labels), 2, MAX_DRAFT_TOKENS + 1]``: drafts by number of tokens, and by
            number of accepted ones.
        """
        counts = np.zeros((len(labels), 2, MAX_DRAFT_TOKENS + 1), np.int64)
        self._drafts |= dict(zip(labels, counts, strict=True))
        return counts

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

    def count_partial_text(self, kind: str) -> None:
        """A source's drafter lacks the beginning of one more request's text."""
        self._of(kind).num_partial_texts += 1

    def set_up(self, kind: str, up: bool, reason: str = "") -> None:
        """A source is being asked from now on, or is switched off."""
        health = self._of(kind)
        health.up, health.why_off = up, reason

    def set_reachable(self, kind: str, reachable: bool, reason: str = "") -> None:
        """What a source needs is there from now on, or is not; for any one thread.

        Args:
            kind: of the source.
            reachable: whether it can draft at all.
            reason: why it cannot, for some requests or for all.
        """
        health = self._of(kind)
        health.reachable, health.why_away = reachable, reason

    def snapshot(self) -> SpeculationSnapshot:
        """The state now; costs some microseconds, meant for once a second or on request.

        May be called from another thread: what is counted meanwhile may be missing.
        """
        return SpeculationSnapshot(
            tuple(
                AcceptanceSnapshot(label, tuple(drafted), tuple(accepted))
                for label, drafted, accepted in self._counted()
            ),
            tuple(
                HealthSnapshot(
                    kind,
                    health.up and health.reachable,
                    health.num_errors,
                    health.num_timeouts,
                    health.num_partial_texts,
                    tuple(health.latency),
                    health.latency_sum_s,
                    health.why_off or health.why_away,
                )
                for kind, health in list(self._health.items())
            ),
            None if self._look_at_trie is None else self._look_at_trie(),
        )

    def _counted(self) -> Iterator[tuple[str, list[int], list[int]]]:
        """(label, by number drafted, by number accepted), up to the longest, of those seen."""
        for label, (drafted, accepted) in list(self._drafts.items()):
            if lengths := np.flatnonzero(drafted).tolist():
                end = lengths[-1] + 1
                yield label, drafted[:end].tolist(), accepted[:end].tolist()

    def _of(self, kind: str) -> _Health:
        health = self._health.get(kind)
        if health is None:
            health = self._health[kind] = _Health()
        return health


class _Health:
    __slots__ = (
        "latency",
        "latency_sum_s",
        "num_errors",
        "num_partial_texts",
        "num_timeouts",
        "reachable",
        "up",
        "why_away",
        "why_off",
    )

    def __init__(self) -> None:
        self.up = True
        self.reachable = True
        self.num_errors = 0
        self.num_timeouts = 0
        self.num_partial_texts = 0
        self.latency = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self.latency_sum_s = 0.0
        self.why_off = self.why_away = ""


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
        max(now.num_partial_texts - before.num_partial_texts, 0),
        _minus(now.latency, before.latency),
        max(now.latency_sum_s - before.latency_sum_s, 0.0),
        now.reason,
    )


def _trie_since(now: TrieSnapshot | None, before: TrieSnapshot | None) -> TrieSnapshot | None:
    """A namespace that has lost its trie is told once more, as empty: gauges keep their value."""
    if now is None or before is None:
        return now
    earlier = {entry.namespace: entry for entry in before.namespaces}
    namespaces = tuple(
        _namespace_since(each, earlier.get(each.namespace)) for each in now.namespaces
    )
    kept = {entry.namespace for entry in now.namespaces}
    gone = tuple(NamespaceSnapshot(name, 0, 0, 0, 0) for name in earlier if name not in kept)
    link = now.link
    if link is not None and before.link is not None:
        link = LinkSnapshot(
            link.up,
            link.lag_s,
            max(link.received_tokens - before.link.received_tokens, 0),
            max(link.dropped_tokens - before.link.dropped_tokens, 0),
        )
    return TrieSnapshot((*namespaces, *gone), link)


def _namespace_since(now: NamespaceSnapshot, before: NamespaceSnapshot | None) -> NamespaceSnapshot:
    if before is None or now.ingested_tokens < before.ingested_tokens:
        return now
    return NamespaceSnapshot(
        now.namespace,
        now.num_tokens,
        now.num_bytes,
        now.ingested_tokens - before.ingested_tokens,
        now.evicted_tokens - before.evicted_tokens,
    )
