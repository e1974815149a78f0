"""Fills a running application's draft memory with texts from a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import track

from specserve.core.config import AppConfig
from specserve.core.errors import (
    ConfigError,
    MissingExtraError,
    SpecServeError,
    StoreError,
    reason_of,
)
from specserve.core.source_config import TrieConfig
from specserve.engine.checkpoint import find_checkpoint, model_identity
from specserve.engine.cluster_memory import shared_trie, store_options
from specserve.serve.config_file import Application, read
from specserve.trie.namespaces import namespace, shard_of
from specserve.trie.store import StoreOptions
from specserve.trie.store_actor import RayStoreClient, list_stores
from specserve.trie.text_writer import write_texts
from specserve.trie.warm_texts import read_file


@dataclass(frozen=True, slots=True)
class Warmup:
    """The memory that texts are written to.

    Attributes:
        namespace: whose texts they are.
        store: the store's options.
        tokenizer: the model's, of transformers.
    """

    namespace: str
    store: StoreOptions
    tokenizer: Any

    @classmethod
    def of(cls, path: Path, application: str, tenant: str, adapter: str) -> Self:
        """The memory of an application.

        Args:
            path: the application's Serve file.
            application: its name; empty where the file has one alone.
            tenant: whose texts they are; empty where tenants share, or there are none.
            adapter: name of a LoRA adapter; empty: none.

        Raises:
            SpecServeError: the file is wrong, or has no such application, memory or tenant.
        """
        config = _application(path, application).config
        with _field_of(path):
            source = shared_trie(config)
            _check_tenant(config, source, tenant)
            identity = model_identity(config.model)
            tokenizer, vocab_size = _load(config)
        name = namespace(identity, adapter, tenant)
        shard = shard_of(name, source.num_store_shards)
        return cls(name, store_options(source, identity, vocab_size, shard), tokenizer)

    def check(self, path: Path) -> int:
        """Reads a file of texts through; how many there are.

        Raises:
            SpecServeError: the first line that is wrong.
        """
        return sum(1 for _ in read_file(path, self.store.vocab_size))

    def run(self, path: Path, num_texts: int) -> int:
        """Writes them, with a progress bar; how many tokens. Needs a connection to Ray.

        Raises:
            StoreError: there is no such memory, or it stopped answering.
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


def _load(config: AppConfig) -> tuple[Any, int]:
    """The model's tokenizer, and the size of its vocabulary."""
    try:
        from transformers import AutoConfig, AutoTokenizer
    except ImportError:
        raise MissingExtraError("specserve trie warm") from None
    checkpoint = find_checkpoint(config.model)
    options = {
        "revision": config.model.revision or "main",
        "trust_remote_code": bool(config.engine.vllm.get("trust_remote_code", False)),
    }
    try:
        model = AutoConfig.from_pretrained(checkpoint.path, **options)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.tokenizer, **options)
    except (OSError, ValueError) as error:
        allowed = f"a tokenizer: {reason_of(error)}"
        raise ConfigError("model.path", config.model.path, allowed) from None
    return tokenizer, int(model.get_text_config().vocab_size)


@contextmanager
def _field_of(path: Path) -> Iterator[None]:
    """Has errors say which file they are about."""
    try:
        yield
    except ConfigError as error:
        if error.field.startswith("--"):
            raise
        raise SpecServeError(f"{path}: {error}") from None
