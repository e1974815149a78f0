"""Starts shards and a drafter beside rank 0, in a process that is connected to a cluster.

``python -m tests.integration.beside_rank_0 ADDRESS`` reads a JSON list of applications' ``args``.
For each it writes the place of each rank, the drafter's place before and after it was killed, and
the free part of each reserved GPU. It also checks that the drafter ends with rank 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from vllm.platforms import current_platform
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2
from vllm.v1.executor.ray_utils import get_bundles_sorted_by_node

from specserve.core.config import parse
from specserve.drafters.actor import start_beside
from specserve.drafters.options import DrafterOptions, drafter_options
from specserve.engine.llm import prepare_environment
from specserve.serve.placement import reserve
from tests.integration.cluster import eventually

WAIT_S = 60.0


def own_place() -> dict[str, Any]:
    """Node and process of the calling actor, and the GPUs that it sees."""
    context = ray.get_runtime_context()
    return {
        "node": context.get_node_id(),
        "gpus": [str(each) for each in context.get_accelerator_ids()["GPU"]],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "pid": os.getpid(),
    }


class Drafter:
    """A drafter's actor without a model."""

    def __init__(self, options: DrafterOptions, *, is_shared: bool) -> None:
        assert not is_shared

    def place(self) -> dict[str, Any]:
        return own_place()


class Shard:
    """A shard's actor without a model."""

    def place(self) -> dict[str, Any]:
        return own_place()

    def start_drafter(self, options: DrafterOptions) -> None:
        self._drafter = start_beside(ray.remote(max_restarts=-1)(Drafter), options)

    def drafter(self) -> dict[str, Any]:
        place: dict[str, Any] = ray.get(self._drafter.place.remote())
        return place


def main(address: str) -> None:
    """Writes the answers to standard output."""
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    ray.init(address, log_to_driver=False)
    type(current_platform).ray_device_key = "GPU"
    answers.write(json.dumps([_try(args) for args in json.load(sys.stdin)]))


def _try(args: Any) -> dict[str, Any]:
    config = parse(args)
    (source,) = config.beside_rank_0.values()
    prepare_environment(config)
    bundle = config.placement.shard_bundle(on_gpu=True)
    group = asyncio.run(reserve(config.placement, bundle, config.engine.tensor_parallel_size))
    shards = _start_shards(group)
    ranks = ray.get([shard.place.remote() for shard in shards])
    ray.get(shards[0].start_drafter.remote(drafter_options(source, "m", 64)))
    first = ray.get(shards[0].drafter.remote())
    free = _free_gpus(group)
    os.kill(first["pid"], signal.SIGKILL)
    second = eventually(lambda: _new_drafter(shards[0], first["pid"]), "a drafter again", WAIT_S)
    ray.kill(shards[0])
    eventually(lambda: not psutil.pid_exists(second["pid"]), "the drafter's end", WAIT_S)
    remove_placement_group(group)
    eventually(_all_is_free, "the shards' places free again", WAIT_S)
    return {"ranks": ranks, "drafters": [first, second], "free": free}


def _start_shards(group: PlacementGroup) -> list[Any]:
    """Starts the shards as vLLM's executor does, with its platform's variable for GPUs."""
    return [
        ray.remote(Shard)
        .options(
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
            **RayExecutorV2._get_actor_resource_kwargs(),
        )
        .remote()
        for bundle, _, _ in get_bundles_sorted_by_node(group)
    ]


def _new_drafter(shard: Any, pid: int) -> dict[str, Any] | None:
    """The place of a drafter whose process is not ``pid``; None if there is none."""
    try:
        place: dict[str, Any] = ray.get(shard.drafter.remote())
    except RayError:
        return None
    return place if place["pid"] != pid else None


def _free_gpus(group: PlacementGroup) -> list[float]:
    """The free part of each bundle's GPU, in the order of ranks."""
    nodes = available_resources_per_node()
    return [
        nodes[node].get(f"GPU_group_{bundle}_{group.id.hex()}", 0.0)
        for bundle, node, _ in get_bundles_sorted_by_node(group)
    ]


def _all_is_free() -> bool:
    free, there = ray.available_resources(), ray.cluster_resources()
    return all(free.get(name) == there[name] for name in ("CPU", "GPU"))


if __name__ == "__main__":
    main(*sys.argv[1:])
