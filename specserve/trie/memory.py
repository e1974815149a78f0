"""One replica's draft memory: a trie for each namespace, each with its own part of the bytes."""

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
"""How long after its last request an adapter keeps its trie while another adapter asks for one."""


class SharedMemory(Protocol):
    """The way to the memories of the other replicas. No call blocks."""

    def publish(self, piece: TextPiece) -> None:
        """Tells the others what follows in a text; the tokens are copied.

        They are dropped, and counted, where others wait in too great number.
        """
        ...

    def link(self) -> LinkSnapshot:
        """How the way is now; for any thread."""
        ...


@dataclass(slots=True)
class _Place:
    """A namespace's trie.

    Attributes:
        num_requests: requests of this replica that use it now.
        last_request: when the last one began or ended, in monotonic seconds; -inf: there was none.
    """

    trie: TokenTrie
    num_requests: int = 0
    last_request: float = -inf


class TrieMemory:
    """Tries that never see one another. Calls may come from several threads.

    Each configured tenant has a trie for the model alone, from the first, and as many more as
    adapters may be loaded. Nobody else gets one: the cluster's log outlives configurations, and has
    texts of tenants and of applications that are not this replica's.

    The adapters that the configuration names have theirs from the first too. Others may be loaded
    at run time, and are known from requests alone. Text of such an adapter from other replicas may
    use one of its tenant's tries that is free. A request of this replica may also take one that no
    request of this replica has used, or none for ``KEPT_S`` seconds: what was in it is forgotten
    here. So the log alone takes no trie from anybody.

    Each trie has the same number of bytes from the first: what one learns makes no other forget.

    Args:
        max_bytes: of all together.
        namespaces: of the model alone, one for each configured tenant.
        num_adapters: how many adapters may be loaded at a time.
        adapters: namespaces of the adapters that the configuration names, the first ones first.
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
        """Tries of each tenant for adapters."""
        self._trie_bytes = max_bytes // (len(namespaces) * (1 + num_adapters))
        self._clock = clock
        # All are made now: no request waits for the memory.
        self._own = {name: _Place(TokenTrie(self._trie_bytes)) for name in namespaces}
        self._adapters: dict[str, _Place] = {}
        self._free = {
            half_of(name): [TokenTrie(self._trie_bytes) for _ in range(num_adapters)]
            for name in namespaces
        }
        self._lock = threading.Lock()
        for name in adapters:
            if (place := self._find(name)) is not None:
                place.last_request = clock()

    def has_tenant(self, namespace: str) -> bool:
        """Whether the namespace is a configured tenant's."""
        return half_of(namespace) in self._free

    def for_record(self, namespace: str) -> TokenTrie | None:
        """The trie for text of another replica; None: it is not to be learned here."""
        with self._lock:
            place = self._find(namespace)
            return None if place is None else place.trie

    def for_request(self, namespace: str) -> TokenTrie | None:
        """The trie for a request of this replica; None: there is none for it.

        Where there is one, it is kept until :meth:`release`. An adapter that takes the trie of
        another one waits until a new one is allocated.
        """
        with self._lock:
            place = self._find(namespace) or self._taken_over(namespace)
            if place is None:
                return None
            place.num_requests += 1
            place.last_request = self._clock()
            return place.trie

    def release(self, namespace: str) -> None:
        """A request that got a trie has ended."""
        with self._lock:
            place = self._find(namespace)
            assert place is not None
            place.num_requests -= 1
            place.last_request = self._clock()

    def snapshot(self) -> tuple[NamespaceSnapshot, ...]:
        """What each namespace holds now."""
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

    def clear(self, purged: str) -> None:
        """Forgets all that a namespace, or a tenant by its half of the name, was taught."""
        for name, trie in self.tries().items():
            if is_part_of(name, purged):
                trie.clear()

    def _find(self, namespace: str) -> _Place | None:
        """The namespace's place, if need be a free one."""
        place = self._own.get(namespace) or self._adapters.get(namespace)
        if place is None and (free := self._free.get(half_of(namespace))):
            place = self._adapters[namespace] = _Place(free.pop())
        return place

    def _taken_over(self, namespace: str) -> _Place | None:
        """A place of another adapter of the same tenant, of the one longest without a request."""
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
        del self._adapters[min(unused, key=unused.__getitem__)]
        # A new trie: the old one may just be learning a record of its namespace.
        place = self._adapters[namespace] = _Place(TokenTrie(self._trie_bytes))
        return place
