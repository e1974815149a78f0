"""The counters of speculation, updated in the decoding loop and exported as snapshots.

The decoding loop only adds to integers. A :class:`SpeculationSnapshot` travels from rank 0 to the
replica, where exporters turn it into series (:mod:`specserve.core.samples`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

import msgspec
import numpy as np

from specserve.core.metric_specs import LATENCY_BUCKETS_S
from specserve.core.source_config import MAX_DRAFT_TOKENS
from specserve.core.types import Int64Array


class AcceptanceSnapshot(msgspec.Struct, frozen=True):
    """Verified drafts of one source, since the start.

    Attributes:
        source: label of the drafts.
        drafted: ``drafted[k]`` drafts had k tokens; up to the longest draft seen.
        accepted: ``accepted[k]`` drafts had exactly their first k tokens accepted; as long as
            ``drafted``.
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

    def since(self, before: AcceptanceSnapshot | None) -> AcceptanceSnapshot:
        """The difference to an earlier snapshot of the same source; None: all counts."""
        if before is None:
            return self
        return AcceptanceSnapshot(
            self.source,
            _minus(self.drafted, before.drafted),
            _minus(self.accepted, before.accepted),
        )


class HealthSnapshot(msgspec.Struct, frozen=True):
    """Calls to one kind of source, since the start.

    Attributes:
        up: whether it is asked for drafts, and able to draft.
        num_errors: calls that raised and drafts that were malformed.
        num_partial_texts: requests whose drafter lacks the beginning of the text.
        latency: calls by duration, one count per bucket of ``LATENCY_BUCKETS_S`` plus an open one.
        latency_sum_s: duration of all calls, in seconds.
        reason: why it is not up, or why it drafts only for some requests; empty if unknown.
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
    """One namespace of a replica's draft memory: current sizes, and totals since the start.

    ``namespace`` is its label, see :func:`specserve.trie.namespaces.label`. A part of ``num_bytes``
    may be unused.
    """

    namespace: str
    num_tokens: int
    num_bytes: int
    ingested_tokens: int
    evicted_tokens: int


class LinkSnapshot(msgspec.Struct, frozen=True):
    """A replica's link to the cluster's draft memory: ``up`` while the store answers.

    ``lag_s`` is the age in seconds of the oldest token in transit. Since the start,
    ``received_tokens`` came from other replicas and ``dropped_tokens`` could not be sent.
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
    """All counters at one moment; small, and serialisable by msgspec."""

    acceptance: tuple[AcceptanceSnapshot, ...] = ()
    health: tuple[HealthSnapshot, ...] = ()
    trie: TrieSnapshot | None = None


class SpeculationMetrics:
    """The counters of one process. Updates are a few integer additions, from one thread.

    Snapshots contain the sources of ``kinds`` even before their first call.

    Attributes:
        has_failed: whether :meth:`fail` was called.
    """

    def __init__(self, kinds: tuple[str, ...] = ()) -> None:
        self.has_failed = False
        self._drafts: dict[str, Int64Array] = {}  # by label, see `draft_counts`
        self._health = defaultdict(_Health, {kind: _Health() for kind in kinds})
        self._get_trie: Callable[[], TrieSnapshot] | None = None

    def watch_trie(self, look: Callable[[], TrieSnapshot]) -> None:
        """Adds the draft memory to every snapshot; ``look`` is called from any thread."""
        self._get_trie = look

    def draft_counts(self, labels: Sequence[str]) -> Int64Array:
        """The counters of drafts with these labels, which the caller updates.

        Returns:
            int64 ``[len(labels), 2, MAX_DRAFT_TOKENS + 1]``: verified drafts by number of tokens,
            and by number of accepted tokens.
        """
        counts = np.zeros((len(labels), 2, MAX_DRAFT_TOKENS + 1), np.int64)
        self._drafts |= dict(zip(labels, counts, strict=True))
        return counts

    def count_call(self, kind: str, seconds: float) -> None:
        """Counts a source's answer for one batch."""
        health = self._health[kind]
        health.latency[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        health.latency_sum_s += seconds

    def count_error(self, kind: str) -> None:
        """Counts a source's exception or malformed draft."""
        self._health[kind].num_errors += 1

    def count_timeout(self, kind: str) -> None:
        """Counts a call to a source that missed its deadline."""
        self._health[kind].num_timeouts += 1

    def count_partial_text(self, kind: str) -> None:
        """Counts a request whose drafter lacks the beginning of the text."""
        self._health[kind].num_partial_texts += 1

    def set_up(self, kind: str, up: bool, reason: str = "") -> None:
        """Notes whether a source is asked for drafts from now on, and why not."""
        health = self._health[kind]
        health.up, health.why_off = up, reason

    def fail(self, reason: str) -> None:
        """Counts an error of every source, and shows all as failed from now on, with a reason."""
        self.has_failed = True
        for kind in list(self._health):
            self.count_error(kind)
            self.set_up(kind, False, reason)

    def set_reachable(self, kind: str, reachable: bool, reason: str = "") -> None:
        """Notes whether a source can draft from now on, and why not for some or all requests.

        Call it from one thread only, which may be any.
        """
        health = self._health[kind]
        health.reachable, health.why_away = reachable, reason

    def snapshot(self) -> SpeculationSnapshot:
        """The current counters; takes some microseconds, for a call per second or on request.

        May be called from another thread; counts added meanwhile may be missing.
        """
        return SpeculationSnapshot(
            tuple(self._acceptance()),
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
            None if self._get_trie is None else self._get_trie(),
        )

    def _acceptance(self) -> Iterator[AcceptanceSnapshot]:
        """The counts of each label with drafts, up to its longest draft."""
        for label, counts in list(self._drafts.items()):
            if end := len(np.trim_zeros(counts[0], "b")):
                drafted, accepted = counts[:, :end].tolist()
                yield AcceptanceSnapshot(label, tuple(drafted), tuple(accepted))


@dataclass(slots=True)
class _Health:
    up: bool = True
    reachable: bool = True
    num_errors: int = 0
    num_timeouts: int = 0
    num_partial_texts: int = 0
    latency: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    latency_sum_s: float = 0.0
    why_off: str = ""
    why_away: str = ""


def _at_least(counts: tuple[int, ...]) -> tuple[int, ...]:
    """``[sum(counts[1:]), sum(counts[2:]), ...]``."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]


def _minus(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip_longest(now, before, fillvalue=0))
