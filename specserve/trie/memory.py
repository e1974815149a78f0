"""One replica's draft memory: a trie for each namespace, each with its own part of the bytes."""

from __future__ import annotations

import threading
from typing import Protocol

from specserve.core.metrics import LinkSnapshot, NamespaceSnapshot
from specserve.core.types import Int32Array
from specserve.trie.token_trie import TokenTrie


class SharedMemory(Protocol):
    """The way to the memories of the other replicas. No call blocks."""

    def publish(
        self,
        namespace: str,
        sequence: str,
        start: int,
        tokens: Int32Array,
        num_prompt_tokens: int = 0,
        final: bool = False,
    ) -> bool:
        """Tells the others what follows in a text.

        Args:
            namespace: whose text it is.
            sequence: the text's id, unique in the cluster.
            start: position of the first of these tokens in the text.
            tokens: int32 ``[k]``, copied.
            num_prompt_tokens: how many of them, from the first one, are prompt.
            final: the text ends here.

        Returns:
            False if these tokens were dropped, because others wait in too great number.
        """
        ...

    def link(self) -> LinkSnapshot:
        """How the way is now; for any thread."""
        ...


class TrieMemory:
    """Tries that never see one another. Calls may come from several threads.

    Each namespace has the same number of bytes from the first: what one learns makes no other
    forget.

    Args:
        max_bytes: of all together.
        num_namespaces: how many there may be; a further one is not learned.
    """

    def __init__(self, max_bytes: int, num_namespaces: int = 1) -> None:
        # All are made now: no request waits for the memory.
        self._unused = [TokenTrie(max_bytes // num_namespaces) for _ in range(num_namespaces)]
        self._tries: dict[str, TokenTrie] = {}
        self._lock = threading.Lock()

    def of(self, namespace: str) -> TokenTrie | None:
        """The trie of a namespace; None: there is no room for it."""
        trie = self._tries.get(namespace)
        if trie is None:
            with self._lock:
                if namespace not in self._tries and self._unused:
                    self._tries[namespace] = self._unused.pop()
                trie = self._tries.get(namespace)
        return trie

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
        """All tries there are, by namespace."""
        with self._lock:
            return dict(self._tries)

    def clear(self, namespace: str) -> int:
        """Forgets all that a namespace was taught.

        Returns:
            How many tokens that were.
        """
        trie = self._tries.get(namespace)
        return trie.clear() if trie is not None else 0
