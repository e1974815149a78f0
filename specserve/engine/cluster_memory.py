"""Joins a replica's draft memory to the cluster's; for processes that are connected to Ray."""

from __future__ import annotations

from specserve.core.config import TrieConfig
from specserve.core.metrics import LinkSnapshot
from specserve.trie.learner import ClusterLearner
from specserve.trie.memory import TrieMemory
from specserve.trie.replica import ReplicaOptions, TrieReplica
from specserve.trie.store import StoreOptions
from specserve.trie.store_actor import RayStoreClient

_LOG_SHARE = 8
"""A log takes 4 bytes a token and some 300 a record of 16 to 4096 tokens, a trie takes 65 a token:
so the log holds about what the trie does."""

_LEAST_LOG_BYTES = 1 << 20


class ClusterMemory:
    """What a replica learns goes to all others, and what they learn comes to it.

    Args:
        config: of the source.
        memory: the replica's, which is taught.
        model_identity: replicas of one identity share.
        vocab_size: token ids are below it.
    """

    def __init__(
        self, config: TrieConfig, memory: TrieMemory, model_identity: str, vocab_size: int
    ) -> None:
        store = store_options(config, model_identity, vocab_size)
        options = ReplicaOptions(
            fingerprint=model_identity, vocab_size=vocab_size, max_bytes=store.max_bytes
        )
        learner = ClusterLearner(memory)
        self._replica = TrieReplica(RayStoreClient(store), learner.apply, options)
        self._replica.start()
        self.publish = self._replica.publish

    def link(self) -> LinkSnapshot:
        """How the way to the other replicas is now."""
        stats = self._replica.stats()
        lag_s = max(stats.unsent_s, stats.receive_lag_s)
        return LinkSnapshot(stats.up, lag_s, stats.received_tokens, stats.dropped_tokens)


def store_options(config: TrieConfig, model_identity: str, vocab_size: int) -> StoreOptions:
    """The store that a configuration describes."""
    return StoreOptions(
        fingerprint=model_identity,
        vocab_size=vocab_size,
        max_bytes=max(config.max_bytes // _LOG_SHARE, _LEAST_LOG_BYTES),
        snapshot_url=config.snapshot_url,
        snapshot_interval_s=config.snapshot_interval_s,
    )
