"""Joins a replica's draft memory to the cluster's; for processes that are connected to Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError
from specserve.core.metrics import LinkSnapshot
from specserve.core.source_config import TrieConfig
from specserve.trie.learner import ClusterLearner
from specserve.trie.memory import TrieMemory
from specserve.trie.namespaces import shard_of
from specserve.trie.records import StoreClient, TextPiece
from specserve.trie.replica import ReplicaOptions, TrieReplica
from specserve.trie.store import StoreOptions
from specserve.trie.store_actor import RayStoreClient

logger = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""How long a replica that ends may take to send what it has learned last."""

_LOG_SHARE = 8
"""A log takes 4 bytes a token and some 300 a record of 16 to 4096 tokens, a trie takes 61 a token:
so the log holds about what the trie does."""

_LEAST_LOG_BYTES = 1 << 20


class ClusterMemory:
    """What a replica learns goes to all others, and what they learn comes to it.

    Args:
        memory: the replica's, which is taught.
        model_identity: replicas of one identity share.
        connect: the way to a store.
    """

    def __init__(
        self,
        config: TrieConfig,
        memory: TrieMemory,
        model_identity: str,
        vocab_size: int,
        connect: Callable[[StoreOptions], StoreClient] = RayStoreClient,
    ) -> None:
        learner = ClusterLearner(memory)
        self._links = []
        for shard in range(config.num_store_shards):
            store = store_options(config, model_identity, vocab_size, shard)
            options = ReplicaOptions(fingerprint=model_identity, max_bytes=store.max_bytes)
            self._links.append(TrieReplica(connect(store), learner.apply, options))
        for link in self._links:
            link.start()

    def publish(self, piece: TextPiece) -> None:
        """See :meth:`TrieReplica.publish`; the namespace tells the store."""
        self._links[shard_of(piece.namespace, len(self._links))].publish(piece)

    def link(self) -> LinkSnapshot:
        """How the way to the other replicas is now; of several stores the worst."""
        return LinkSnapshot(
            up=all(link.up for link in self._links),
            lag_s=max(max(link.unsent_s, link.receive_lag_s) for link in self._links),
            received_tokens=sum(link.received_tokens for link in self._links),
            dropped_tokens=sum(link.dropped_tokens for link in self._links),
        )

    def close(self) -> None:
        """Sends what is left, for at most ``LAST_WORDS_S`` seconds, and ends the links."""
        with ThreadPoolExecutor(len(self._links)) as pool:  # one that hangs takes no other's time
            sent = list(pool.map(lambda link: link.stop(LAST_WORDS_S), self._links))
        if not all(sent):
            logger.warning("The draft memory did not take all that this replica learned last")


def shared_trie(config: AppConfig) -> TrieConfig:
    """The source whose memory is the cluster's.

    Raises:
        ConfigError: there is none; names the field that makes one.
    """
    for index, source in enumerate(config.speculation):
        if isinstance(source, TrieConfig):
            if source.share != "cluster":
                raise ConfigError(f"speculation.{index}.share", source.share, "cluster")
            return source
    kinds = [source.kind for source in config.speculation]
    raise ConfigError("speculation", kinds, "a list with a source of kind trie")


def store_options(
    config: TrieConfig, model_identity: str, vocab_size: int, shard: int = 0
) -> StoreOptions:
    """One of the stores that a configuration describes."""
    log_bytes = config.max_bytes // _LOG_SHARE // config.num_store_shards
    return StoreOptions(
        fingerprint=model_identity,
        vocab_size=vocab_size,
        shard=shard,
        max_bytes=max(log_bytes, _LEAST_LOG_BYTES),
        snapshot_url=config.snapshot_url,
        snapshot_interval_s=config.snapshot_interval_s,
        resources=config.store_resources,
    )
