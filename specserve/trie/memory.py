"""One replica's draft memory: a trie for each namespace, all of the same size."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from specserve.core.metrics import LinkSnapshot, NamespaceSnapshot
from specserve.trie.namespaces import half_of, is_part_of
from specserve.trie.records import TextPiece
from specserve.trie.token_trie import TokenTrie

KEPT_S = 600.0
"""Seconds that an adapter keeps its trie after its last request; then another one may take it."""


class SharedMemory(Protocol):
    """Shares text with the other replicas. No call blocks."""

    def publish(self, piece: TextPiece) -> None:
        """Queues the next piece of a text for the other replicas; the tokens are copied.

        If the queue is full, the piece is dropped and its tokens are counted.
        """
        ...

    def link(self) -> LinkSnapshot:
        """State of the connection to the other replicas; for any thread."""
        ...


@dataclass(slots=True)
class _Entry:
    """A namespace's trie and its use.

    Attributes:
        num_requests: requests of this replica that use it now.
        last_request: when a request last began or ended, in monotonic seconds; -inf for never. A
            configured adapter begins with the time of the start.
    """

    trie: TokenTrie
    num_requests: int = 0
    last_request: float = -inf


class TrieMemory:
    """The separate tries of a replica's namespaces. Calls may come from several threads.

    Each configured tenant has one trie for the base model and ``num_adapters`` tries for LoRA
    adapters. All have the same size and are allocated at start, so that no namespace evicts
    another's text. Other tenants get none: the cluster's log may hold text of former tenants and of
    other applications.

    Configured adapters have a trie from the start. Another adapter gets a free trie of its tenant
    with its first request, or with its first text from another replica. If none is free, a request
    takes the trie of an adapter that no request of this replica used in the last ``KEPT_S``
    seconds. Text of that adapter is then forgotten here. Text from other replicas takes only free
    tries.

    Args:
        max_bytes: bytes of all tries together.
        namespaces: of the base model, one for each configured tenant.
        num_adapters: adapters that may be loaded at a time.
        adapters: namespaces of the configured adapters; the first ones get tries first.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_bytes: int,
        namespaces: Sequence[str],
        num_adapters: int = 0,
        adapters: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_adapters = num_adapters
        """Adapter tries of each tenant."""
        self._trie_bytes = max_bytes // (len(namespaces) * (1 + num_adapters))
        self._clock = clock
        # Allocated now, so that no request waits for it.
        self._own = {name: _Entry(TokenTrie(self._trie_bytes)) for name in namespaces}
        self._adapters: dict[str, _Entry] = {}
        self._free = {
            half_of(name): [TokenTrie(self._trie_bytes) for _ in range(num_adapters)]
            for name in namespaces
        }
        self._purged_at: dict[str, float] = {}
        self._lock = threading.Lock()
        for name in adapters:
            if (entry := self._find(name)) is not None:
                entry.last_request = clock()

    def has_tenant(self, namespace: str) -> bool:
        """Whether the namespace belongs to a configured tenant."""
        return half_of(namespace) in self._free

    def for_record(self, namespace: str) -> TokenTrie | None:
        """The trie for text of another replica; None if this replica must not learn it."""
        with self._lock:
            entry = self._find(namespace)
            return None if entry is None else entry.trie

    def for_request(self, namespace: str) -> TokenTrie | None:
        """The trie for a request of this replica; None if none is available.

        It stays the namespace's trie at least until :meth:`release`. The call allocates memory if
        an adapter takes another adapter's trie.
        """
        with self._lock:
            entry = self._find(namespace) or self._take_unused(namespace)
            if entry is None:
                return None
            entry.num_requests += 1
            entry.last_request = self._clock()
            return entry.trie

    def release(self, namespace: str) -> None:
        """Ends a request's use of the trie that :meth:`for_request` returned."""
        with self._lock:
            entry = self._find(namespace)
            assert entry is not None
            entry.num_requests -= 1
            entry.last_request = self._clock()

    def snapshot(self) -> tuple[NamespaceSnapshot, ...]:
        """Token counts and size of each namespace's trie."""
        return tuple(
            NamespaceSnapshot(
                name,
                trie.num_tokens,
                trie.num_bytes,
                trie.num_ingested_tokens,
                trie.num_evicted_tokens,
            )
            for name, trie in self.tries().items()
        )

    def tries(self) -> dict[str, TokenTrie]:
        """All tries in use, by namespace."""
        with self._lock:
            return {name: each.trie for name, each in (self._own | self._adapters).items()}

    def was_purged_since(self, namespace: str, began: float) -> bool:
        """Whether a purge with a stamp of ``began`` or later covered the namespace."""
        stamps = (self._purged_at.get(each, -inf) for each in (namespace, half_of(namespace)))
        return max(stamps) >= began

    def clear(self, purged: str, stamp: float) -> None:
        """Clears the trie of a namespace, or all tries of a tenant by its half of the name.

        ``stamp`` is the purge's, in seconds since 1970.
        """
        self._purged_at[purged] = stamp
        for name, trie in self.tries().items():
            if is_part_of(name, purged):
                trie.clear()

    def _find(self, namespace: str) -> _Entry | None:
        """The namespace's entry; a new adapter gets a free trie of its tenant, if there is one."""
        entry = self._own.get(namespace) or self._adapters.get(namespace)
        if entry is None and (free := self._free.get(half_of(namespace))):
            entry = self._adapters[namespace] = _Entry(free.pop())
        return entry

    def _take_unused(self, namespace: str) -> _Entry | None:
        """Replaces the tenant's adapter unused longest, at least ``KEPT_S``; None without such."""
        until = self._clock() - KEPT_S
        unused = {
            name: each.last_request
            for name, each in self._adapters.items()
            if half_of(name) == half_of(namespace)
            and not each.num_requests
            and each.last_request <= until
        }
        if not unused:
            return None
        # A new trie, because another thread may still write a record to the old one.
        entry = _Entry(TokenTrie(self._trie_bytes))
        del self._adapters[min(unused, key=unused.__getitem__)]
        self._adapters[namespace] = entry
        return entry
