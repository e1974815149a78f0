"""Synchronizes a replica's draft memory with the cluster's. Needs a connection to Ray."""

from __future__ import annotations

from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError
from specserve.core.source_config import TrieConfig
from specserve.trie.learner import ClusterLearner
from specserve.trie.memory import TrieMemory
from specserve.trie.replica import ReplicaOptions, TrieReplica
from specserve.trie.store import StoreOptions
from specserve.trie.store_actor import RayStoreClient

_LOG_SHARE = 8
"""Ratio of a trie's memory to a store's log; with it both hold about as many tokens. A trie takes
61 bytes a token. A log takes 4, plus about 300 for each record of 16 to 4096 tokens."""

_MIN_LOG_BYTES = 1 << 20


def joined_replica(
    config: TrieConfig, memory: TrieMemory, model_identity: str, vocab_size: int
) -> TrieReplica:
    """Connects a replica's memory to the cluster's, through the store of its model.

    Args:
        config: the trie source's settings.
        memory: the replica's memory, which receives texts.
        model_identity: replicas with the same identity share texts.
        vocab_size: of the model.
    """
    store = store_options(config, model_identity, vocab_size)
    options = ReplicaOptions(max_bytes=store.max_bytes)
    replica = TrieReplica(RayStoreClient(store), ClusterLearner(memory).apply, options)
    replica.start()
    return replica


def shared_trie(config: AppConfig) -> TrieConfig:
    """Returns the trie source that shares its memory with the cluster.

    Raises:
        ConfigError: there is none; the error names the field to change.
    """
    for index, source in enumerate(config.speculation):
        if isinstance(source, TrieConfig):
            if source.share != "cluster":
                raise ConfigError(f"speculation.{index}.share", source.share, "cluster")
            return source
    kinds = [source.kind for source in config.speculation]
    raise ConfigError("speculation", kinds, "a list with a source of kind trie")


def store_options(config: TrieConfig, model_identity: str, vocab_size: int) -> StoreOptions:
    """Options of the store, by the configuration."""
    return StoreOptions(
        fingerprint=model_identity,
        vocab_size=vocab_size,
        max_bytes=max(config.max_bytes // _LOG_SHARE, _MIN_LOG_BYTES),
        snapshot_url=config.snapshot_url,
        snapshot_interval_s=config.snapshot_interval_s,
        resources=config.store_resources,
    )
