"""What tenants may do with their part of the cluster's draft memory: fill, look at and clear it."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from specserve.core.errors import ConfigError
from specserve.core.types import Int32Array
from specserve.trie.namespaces import half_of, namespace, shard_of, tenant_half
from specserve.trie.records import StoreClient
from specserve.trie.store import StoreOptions, TrieStore
from specserve.trie.store_actor import RayStoreClient, RemoteStore, list_stores
from specserve.trie.text_writer import TextWriter
from specserve.trie.warm_texts import read_texts

ANSWER_S = 10.0
"""How long a store may take to answer, in seconds."""

Tokens = tuple[Int32Array, int]
"""A text's tokens, int32 ``[n]``, and how many of the first ones are prompt."""


class TextReader(NamedTuple):
    """How a replica reads texts.

    Attributes:
        tokenizer: the model's, of transformers; for one thread.
        max_tokens: of a text: the context length.
        max_chars: no text of more characters has so few tokens.
        adapters: the LoRA adapters that are loaded now.
    """

    tokenizer: Any
    max_tokens: int
    max_chars: int
    adapters: Callable[[], Collection[str]]


_find_store = partial(RemoteStore, timeout_s=ANSWER_S)


class TenantMemory:
    """The draft memory of one model. Calls block, and may come from several threads.

    Those that ask a store raise StoreError where it does not answer.

    Args:
        stores: options of the model's stores, by shard.
        connect: the way to a store for texts.
        find: the way to a store that runs, for all else.
        running: names of the stores that run, other models' too.
    """

    def __init__(
        self,
        stores: list[StoreOptions],
        reader: TextReader,
        connect: Callable[[StoreOptions], StoreClient] = RayStoreClient,
        find: Callable[[str], RemoteStore | TrieStore] = _find_store,
        running: Callable[[], Collection[str]] = list_stores,
    ) -> None:
        self._stores = stores
        self._reader = reader
        self._find = find
        self._running = running
        self._writers = [TextWriter(connect(each), each) for each in stores]

    def read(self, body: bytes) -> list[Tokens]:
        """The texts in lines of JSON; see :func:`read_texts`. For one thread.

        Raises:
            ConfigError: a line is wrong or too long, or there is none.
        """
        reader = self._reader
        allowed = f"at most {reader.max_tokens} tokens, the context length"
        texts = []
        for number, text in read_texts(io.BytesIO(body), self._stores[0].vocab_size):
            num_chars = len(text.prompt) + len(text.completion)
            if num_chars > reader.max_chars:
                raise ConfigError(f"line {number}", f"{num_chars} characters", allowed)
            tokens = text.tokens(reader.tokenizer)
            if len(tokens[0]) > reader.max_tokens:
                raise ConfigError(f"line {number}", f"{len(tokens[0])} tokens", allowed)
            texts.append(tokens)
        if not texts:
            raise ConfigError("body", body[:80].decode(errors="replace"), "at least one line")
        return texts

    def teach(self, tenant: str, adapter: str, texts: list[Tokens]) -> None:
        """Teaches texts, all or none.

        Args:
            tenant: whose texts they are; empty: where tenants share, or there are none.
            adapter: the LoRA adapter that they are for; empty: none.

        Raises:
            ConfigError: no such adapter is loaded, or the texts are too much for the memory.
        """
        if adapter and adapter not in (known := self._reader.adapters()):
            raise ConfigError("adapter", adapter, ", ".join(known) or "none: none is loaded")
        name = self._namespace(tenant, adapter)
        self._writers[shard_of(name, len(self._stores))].write(name, texts)

    def held(self, tenant: str) -> list[dict[str, Any]]:
        """The tenant's namespaces with their tokens and, where it is loaded now, their adapter."""
        known = {self._namespace(tenant, each): each for each in ("", *self._reader.adapters())}
        tokens: Counter[str] = Counter()
        for store in self._names():
            tokens.update(self._find(store).stats().tokens_by_namespace)
        return [
            {"namespace": name, "adapter": known.get(name), "tokens": num_tokens}
            for name, num_tokens in tokens.items()
            if half_of(name) == tenant_half(tenant)
        ]

    def purge(self, tenant: str) -> int:
        """Forgets all of a tenant's namespaces, here and in all replicas; how many tokens.

        Raises:
            SnapshotError: forgotten, but a snapshot could not be written and still has the text.
        """
        self.held(tenant)  # all of the stores answer, or none is asked to forget
        stores = [self._find(each) for each in self._names()]
        return sum(each.purge(tenant_half(tenant)) for each in stores)

    def _names(self) -> list[str]:
        """The model's stores: the configured ones, and those of another ``num_store_shards``."""
        configured = [each.name for each in self._stores]
        of_model = configured[0].removesuffix(f"-{self._stores[0].shard}")
        others = {each for each in self._running() if each.rpartition("-")[0] == of_model}
        return configured + sorted(others.difference(configured))

    def _namespace(self, tenant: str, adapter: str) -> str:
        return namespace(self._stores[0].fingerprint, adapter, tenant)
