"""Adds the texts of a file to a running application's draft memory."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import track

from specserve.compare.prompts import load_tokenizer
from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError, MissingExtraError, SpecServeError, StoreError
from specserve.core.source_config import TrieConfig
from specserve.engine.checkpoint import model_identity, text_config
from specserve.engine.cluster_memory import shared_trie, store_options
from specserve.serve.config_file import Application, read
from specserve.trie.namespaces import namespace, shard_of
from specserve.trie.store import StoreOptions
from specserve.trie.store_actor import RayStoreClient, list_stores
from specserve.trie.text_writer import write_texts
from specserve.trie.warm_texts import read_file


@dataclass(frozen=True, slots=True)
class Warmup:
    """The draft memory to fill, and the model's transformers tokenizer."""

    namespace: str
    store: StoreOptions
    tokenizer: Any

    @classmethod
    def of(cls, path: Path, application: str, tenant: str, adapter: str) -> Self:
        """The memory of an application of the Serve file ``path``.

        ``application`` is the name; empty: the only one. ``tenant`` is empty if all requests share
        one memory. ``adapter`` is the LoRA adapter of the texts; empty: none.

        Raises:
            SpecServeError: the file is wrong, or has no such application, memory or tenant.
        """
        config = _application(path, application).config
        try:
            source = shared_trie(config)
            _check_tenant(config, source, tenant)
            _check_adapter(config, adapter)
            identity = model_identity(config.model)
            if find_spec("transformers") is None:
                raise MissingExtraError("specserve trie warm")
            folder = config.model.tokenizer or config.model.path
            tokenizer = load_tokenizer(folder, **config.pretrained_options)
            vocab_size = text_config(config).vocab_size
        except ConfigError as error:
            if error.field.startswith("--"):
                raise
            raise SpecServeError(f"{path}: {error}") from None
        name = namespace(identity, adapter, tenant)
        shard = shard_of(name, source.num_store_shards)
        return cls(name, store_options(source, identity, vocab_size, shard), tokenizer)

    def check(self, path: Path) -> int:
        """Counts the texts of a file.

        Raises:
            SpecServeError: a line is wrong, or the file cannot be read twice.
        """
        if path.exists() and not path.is_file():
            raise ConfigError("FILE", str(path), "a regular file: it is checked, then read again")
        return sum(1 for _ in read_file(path, self.store.vocab_size))

    def run(self, path: Path, num_texts: int) -> int:
        """Writes the texts and returns their number of tokens; needs a connection to Ray.

        Raises:
            StoreError: the cluster has no such memory, or the memory stopped answering.
        """
        if self.store.name not in (running := list_stores()):
            others = f"; others: {', '.join(running)}" if running else ""
            raise StoreError(f"no draft memory of this model runs in this cluster{others}")
        texts = read_file(path, self.store.vocab_size)
        console = Console(stderr=True)
        shown = track(texts, "warming", num_texts, console=console, transient=True)
        client = RayStoreClient(self.store)
        tokens = (text.tokens(self.tokenizer) for text in shown)
        return write_texts(client, self.store, self.namespace, tokens)


def _application(path: Path, name: str) -> Application:
    applications = {each.name: each for each in read(path).applications}
    if not name and len(applications) == 1:
        return next(iter(applications.values()))
    if name not in applications:
        raise ConfigError("--application", name, ", ".join(applications))
    return applications[name]


def _check_tenant(config: AppConfig, source: TrieConfig, tenant: str) -> None:
    names = sorted({key.tenant for key in config.http.api_keys})
    if source.share_tenants or not names:
        if tenant:
            raise ConfigError("--tenant", tenant, "nothing: all requests share one memory")
    elif tenant not in names:
        raise ConfigError("--tenant", tenant, ", ".join(names))


def _check_adapter(config: AppConfig, adapter: str) -> None:
    if adapter and not config.engine.vllm.get("enable_lora"):
        raise ConfigError("--adapter", adapter, "nothing: engine.vllm.enable_lora is not set")
