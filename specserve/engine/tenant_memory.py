"""Lets a tenant fill, inspect and clear its part of the cluster's draft memory."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from specserve.core.errors import ConfigError
from specserve.core.types import Int32Array
from specserve.trie.namespaces import half_of, namespace, tenant_half
from specserve.trie.records import StoreClient
from specserve.trie.store import StoreOptions, TrieStore
from specserve.trie.store_actor import RayStoreClient, RemoteStore
from specserve.trie.text_writer import TextWriter
from specserve.trie.warm_texts import read_texts

ANSWER_S = 10.0
"""Timeout in seconds of a store's answer that needs no snapshot."""

_find_store = partial(RemoteStore, timeout_s=ANSWER_S)


class TenantMemory:
    """The draft memory of one model. Calls block and are thread-safe, except :meth:`read`.

    Calls to the store raise StoreError if it does not answer.

    Args:
        store: options of the model's store.
        tokenizer: the model's tokenizer (transformers); for one thread at a time.
        max_tokens: longest text in tokens, the context length.
        max_chars: a text with more characters certainly exceeds ``max_tokens``.
        adapters: returns the names of the LoRA adapters that are loaded now.
        connect: opens a client that writes texts to the store.
        find: returns a running store by its name.
    """

    def __init__(
        self,
        store: StoreOptions,
        tokenizer: Any,
        max_tokens: int,
        max_chars: int,
        adapters: Callable[[], Collection[str]],
        connect: Callable[[StoreOptions], StoreClient] = RayStoreClient,
        find: Callable[[str], RemoteStore | TrieStore] = _find_store,
    ) -> None:
        self._store = store
        self._tokenizer = tokenizer
        self._max_tokens, self._max_chars = max_tokens, max_chars
        self._adapters = adapters
        self._find = find
        self._writer = TextWriter(connect(store))

    def read(self, body: bytes) -> list[Int32Array]:
        """Reads texts from JSON lines; see :func:`read_texts`. For one thread at a time.

        Returns:
            The token ids of each text, int32 ``[n]``.

        Raises:
            ConfigError: a line is invalid or too long, or there is no line.
        """
        allowed = f"at most {self._max_tokens} tokens, the context length"
        texts = []
        for number, text in read_texts(io.BytesIO(body), self._store.vocab_size):
            num_chars = len(text.prompt) + len(text.completion)
            if num_chars > self._max_chars:
                raise ConfigError(f"line {number}", f"{num_chars} characters", allowed)
            tokens = text.tokens(self._tokenizer)
            if len(tokens) > self._max_tokens:
                raise ConfigError(f"line {number}", f"{len(tokens)} tokens", allowed)
            texts.append(tokens)
        if not texts:
            raise ConfigError("body", body[:80].decode(errors="replace"), "at least one line")
        return texts

    def teach(self, tenant: str, adapter: str, texts: list[Int32Array]) -> None:
        """Writes texts to the store, all or none.

        Args:
            tenant: the texts' owner; empty if tenants share memory or there are none.
            adapter: the LoRA adapter that the texts are for; empty: none.

        Raises:
            ConfigError: the adapter is not loaded, or the texts exceed the memory.
        """
        if adapter and adapter not in (known := self._adapters()):
            raise ConfigError("adapter", adapter, ", ".join(known) or "none: none is loaded")
        self._writer.write(self._namespace(tenant, adapter), texts)

    def held(self, tenant: str) -> list[dict[str, Any]]:
        """The tenant's namespaces with token counts, and the adapter if it is loaded now."""
        known = {self._namespace(tenant, each): each for each in ("", *self._adapters())}
        tokens = self._find(self._store.name).stats().tokens_by_namespace
        return [
            {"namespace": name, "adapter": known.get(name), "tokens": num_tokens}
            for name, num_tokens in tokens.items()
            if half_of(name) == tenant_half(tenant)
        ]

    def purge(self, tenant: str) -> int:
        """Deletes a tenant's namespaces in the store and all replicas; returns the token count.

        Raises:
            SnapshotError: deleted, but the snapshot could not be written and still has the texts.
        """
        self.held(tenant)  # a store that hangs is noticed sooner than by a purge, which may be long
        return self._find(self._store.name).purge(tenant_half(tenant))

    def _namespace(self, tenant: str, adapter: str) -> str:
        return namespace(self._store.fingerprint, adapter, tenant)
