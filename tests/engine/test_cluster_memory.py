from __future__ import annotations

from specserve.core.source_config import TrieConfig
from specserve.engine.cluster_memory import store_options
from specserve.trie.store import StoreOptions


def test_the_store_gets_an_eighth_of_the_memory_and_the_configured_snapshots_and_resources() -> (
    None
):
    config = TrieConfig(
        kind="trie",
        max_bytes=1 << 30,
        snapshot_url="s3://bucket/folder",
        snapshot_interval_s=7.0,
        store_resources={"head": 0.01},
    )
    assert store_options(config, "m", 500) == StoreOptions(
        fingerprint="m",
        vocab_size=500,
        max_bytes=1 << 27,
        snapshot_url="s3://bucket/folder",
        snapshot_interval_s=7.0,
        resources={"head": 0.01},
    )
