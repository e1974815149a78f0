"""Reserves a replica's resources in the cluster: one bundle for each tensor-parallel shard."""

from __future__ import annotations

import asyncio
from collections import Counter

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from specserve.core.config import PlacementConfig
from specserve.core.errors import PlacementError
from specserve.serve.plan import Node, describe, shortage

HERE_S = 5.0
"""Seconds that Ray has to place a group whose first bundle must be on the caller's node."""

_MEMORY = ("memory", "object_store_memory")


async def reserve(
    placement: PlacementConfig, bundle: dict[str, float], num_shards: int
) -> PlacementGroup:
    """Reserves ``num_shards`` bundles; they are freed when the calling actor ends.

    The caller's node gets a group of one bundle, all bundles with ``STRICT_PACK``, and the first
    one of a group that one node does not hold, if it has room now. So fewer nodes can end the
    replica.

    Raises:
        PlacementError: the bundles did not fit within ``placement.timeout_s`` seconds. The message
            says what was requested and what the cluster has.
    """
    bundles, strategy = [dict(bundle)] * num_shards, placement.strategy
    # For one bundle the strategy does not matter; only STRICT_PACK accepts a preferred node.
    if num_shards == 1 or strategy == "STRICT_PACK":
        node_id = ray.get_runtime_context().get_node_id()
        group = placement_group(bundles, "STRICT_PACK", _soft_target_node_id=node_id)
    else:
        spans = strategy != "PACK" or all(shortage(bundles, [node]) for node in running_nodes())
        # Ray first places the bundle with the most resources, and only this node has this one.
        here = {f"node:{ray.util.get_node_ip_address()}": 0.001} if spans else {}
        group = placement_group([bundle | here, *bundles[1:]], strategy)
        if spans and not await asyncio.to_thread(group.wait, HERE_S):
            remove_placement_group(group)
            group = placement_group(bundles, strategy)
    if await asyncio.to_thread(group.wait, placement.timeout_s):
        return group
    remove_placement_group(group)
    needed, free = _own_resources(bundle), ray.available_resources()
    missing = shortage([bundle] * num_shards, [Node("all", free)])
    equal = Counter(describe(node.resources) for node in running_nodes())
    nodes = ", ".join(f"{count} x ({resources})" for resources, count in equal.items())
    raise PlacementError(
        f"placement: {num_shards} shards with {describe(needed)} each ({placement.strategy}) "
        f"did not fit within {placement.timeout_s:g} s{missing and f': {missing}'}; "
        f"nodes: {nodes}; free in all: {describe(_own_resources(free))}"
    )


def other_nodes(group: PlacementGroup) -> dict[str, int]:
    """Returns the group's nodes except the caller's, each with the index of one of its bundles."""
    own = ray.get_runtime_context().get_node_id()
    bundles = placement_group_table(group)["bundles_to_node_id"]
    return {node: index for index, node in bundles.items() if node != own}


def running_nodes() -> list[Node]:
    """Returns the living nodes of the connected cluster, with all their resources, free or not."""
    return [
        Node(node["NodeManagerAddress"], _own_resources(node["Resources"]))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _own_resources(resources: dict[str, float]) -> dict[str, float]:
    """Returns the resources without those that Ray adds by itself."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if ":" not in name and "_group_" not in name and name not in _MEMORY
    }
