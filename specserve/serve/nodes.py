"""The nodes of a cluster to plan for: of one that is described in a word, or of the running one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import ray

from specserve.core.errors import ConfigError
from specserve.serve.plan import Node

_GROUP = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})(cpu)?")
_ALLOWED = "running, or groups NODESxGPUS and NODESxCPUScpu, such as 2x8 or 2x8+1x16cpu"


def described_nodes(cluster: str, marks: Iterable[str]) -> tuple[list[Node], bool]:
    """Nodes as ``2x8`` describes them, and whether any of them has GPUs.

    Args:
        cluster: groups of equal nodes, joined by ``+``: ``2x8`` are 2 nodes with 8 GPUs and as many
            CPUs as are asked for, ``2x8cpu`` 2 nodes with 8 CPUs and no GPU.
        marks: names of further resources, of which every node has as much as is asked for.

    Raises:
        ConfigError: ``cluster`` is none.
    """
    nodes: list[Node] = []
    on_gpu = False
    for group in cluster.split("+"):
        match = _GROUP.fullmatch(group)
        if match is None:
            raise ConfigError("--cluster", cluster, _ALLOWED)
        amount, is_cpu = float(match[2]), match[3] is not None
        on_gpu |= not is_cpu
        has = {"CPU": amount} if is_cpu else {"GPU": amount, "CPU": math.inf}
        has |= dict.fromkeys(marks, math.inf)
        nodes += [Node(f"node {len(nodes) + i + 1}", has) for i in range(int(match[1]))]
    return nodes, on_gpu


def running_nodes() -> list[Node]:
    """The living nodes of the cluster that this process is connected to, with all they have."""
    return [
        Node(node["NodeManagerAddress"], own_resources(node["Resources"]))
        for node in ray.nodes()
        if node["Alive"]
    ]


def own_resources(resources: dict[str, float]) -> dict[str, float]:
    """Resources without the ones that Ray adds by itself."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if ":" not in name and name not in ("memory", "object_store_memory")
    }
