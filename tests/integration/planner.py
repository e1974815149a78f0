"""Reserves placement groups in a process that is connected to a cluster, and reports their nodes.

``python -m tests.integration.planner ADDRESS`` reads a JSON list of applications' ``args``. It
writes the node of each rank of each application, and all nodes as `specserve check` sees them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

import ray
from ray.util.placement_group import remove_placement_group
from vllm.platforms import current_platform
from vllm.v1.executor.ray_utils import get_bundles_sorted_by_node

from specserve.core.config import AppConfig, parse
from specserve.serve.placement import reserve, running_nodes
from tests.integration.cluster import eventually


def main(address: str) -> None:
    """Writes the answers to standard output."""
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    ray.init(address, log_to_driver=False)
    type(current_platform).ray_device_key = "GPU"
    places = [_ranks(parse(args)) for args in json.load(sys.stdin)]
    nodes = [asdict(node) for node in running_nodes()]
    answers.write(json.dumps({"places": places, "nodes": nodes}))


def _ranks(config: AppConfig) -> list[str]:
    """Address of the node of each rank, in the order of vLLM's executor."""
    bundle = config.placement.shard_bundle(on_gpu=True)
    group = asyncio.run(reserve(config.placement, bundle, config.engine.tensor_parallel_size))
    places = [address for _, _, address in get_bundles_sorted_by_node(group)]
    remove_placement_group(group)
    eventually(_all_is_free, "the shards' places free again", 60)
    return places


def _all_is_free() -> bool:
    free, there = ray.available_resources(), ray.cluster_resources()
    return all(free.get(name) == there[name] for name in ("CPU", "GPU"))


if __name__ == "__main__":
    main(*sys.argv[1:])
