"""Adds the texts of a file to a running application's draft memory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import track

from specserve.cli.cluster import connected
from specserve.compare.prompts import load_tokenizer
from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError, MissingExtraError, SpecServeError, StoreError
from specserve.core.source_config import TrieConfig
from specserve.engine.checkpoint import model_identity, text_config
from specserve.engine.cluster_memory import shared_trie, store_options
from specserve.serve.config_file import Application, read
from specserve.trie.namespaces import namespace
from specserve.trie.store_actor import RayStoreClient, list_stores
from specserve.trie.text_writer import TextWriter
from specserve.trie.warm_texts import read_file


def warm(path: Path, file: Path, application: str, tenant: str, adapter: str, address: str) -> int:
    """Adds the texts of ``file`` to the memory of an application of the Serve file ``path``.

    Args:
        application: its name; empty: the only one.
        tenant: the owner of the texts; empty if all requests share one memory.
        adapter: the LoRA adapter of the texts; empty: none.
        address: address of the Ray cluster.

    Raises:
        SpecServeError: a file is wrong, there is no such application, memory or tenant, or the
            memory stopped answering.
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
    store = store_options(source, identity, vocab_size)

    if file.exists() and not file.is_file():
        raise ConfigError("FILE", str(file), "a regular file: it is checked, then read again")
    num_texts = sum(1 for _ in read_file(file, vocab_size))

    with connected(address):
        if store.name not in (running := list_stores()):
            others = f"; others: {', '.join(running)}" if running else ""
            raise StoreError(f"no draft memory of this model runs in this cluster{others}")
        texts, console = read_file(file, vocab_size), Console(stderr=True)
        shown = track(texts, "warming", num_texts, console=console, transient=True)
        tokens = (text.tokens(tokenizer) for text in shown)
        num_tokens = TextWriter(RayStoreClient(store)).write_many(name, tokens)
    print(f"{num_tokens:,} tokens of {num_texts:,} texts taught to {name}")
    return 0


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
