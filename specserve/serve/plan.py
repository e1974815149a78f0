"""Computes which shard and which drafter would run on which node, without a cluster.

Shards follow the rules of Ray's placement groups. Among the nodes with enough free resources, the
node that keeps the largest share free is taken. Ray breaks ties arbitrarily; here the first node is
taken. Ray may place a drafter on any node that fits; here too the first is taken. A drafter without
GPUs goes to a node with GPUs only if no other node fits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specserve.core.config import AppConfig, PlacementConfig
from specserve.core.errors import ConfigError, PlacementError
from specserve.core.source_config import DrafterConfig

_ROUNDING = 1e-6
"""Tolerance for sums of fractional resources, such as 0.01 CPU. Ray counts in units of 0.0001."""

_GROUP = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})(cpu)?")
_GROUPS = "running, or groups NODESxGPUS and NODESxCPUScpu, such as 2x8 or 2x8+1x16cpu"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster.

    Attributes:
        name: the name shown to the user.
        resources: free resources by Ray's names; infinite if the amount is not known.
    """

    name: str
    resources: dict[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where an application's parts run. Nodes are given by their index.

    Attributes:
        replicas: for each replica the nodes of its shards, by rank. Ranks of one node are
            consecutive. vLLM chooses the node of rank 0: the replica's own, if it has shards.
        drafters: description and node of each drafter.
        left: the nodes, with the resources that remain free.
    """

    replicas: tuple[tuple[int, ...], ...]
    drafters: tuple[tuple[str, int], ...]
    left: tuple[Node, ...]


def described_nodes(cluster: str, marks: Iterable[str]) -> tuple[list[Node], bool]:
    """Returns the nodes that ``cluster`` describes, and whether any of them has GPUs.

    Args:
        cluster: groups of equal nodes, joined by ``+``: ``2x8`` is 2 nodes with 8 GPUs and
            unlimited CPUs, ``2x8cpu`` is 2 nodes with 8 CPUs and no GPU.
        marks: names of further resources, which every node has without limit.

    Raises:
        ConfigError: ``cluster`` has another form.
    """
    nodes: list[Node] = []
    on_gpu = False
    for group in cluster.split("+"):
        match = _GROUP.fullmatch(group)
        if match is None:
            raise ConfigError("--cluster", cluster, _GROUPS)
        amount, is_cpu = float(match[2]), match[3] is not None
        on_gpu |= not is_cpu
        has = {"CPU": amount} if is_cpu else {"GPU": amount, "CPU": math.inf}
        has |= dict.fromkeys(marks, math.inf)
        nodes += [Node(f"node {len(nodes) + i + 1}", has) for i in range(int(match[1]))]
    return nodes, on_gpu


def plan(config: AppConfig, nodes: Sequence[Node], *, on_gpu: bool) -> Plan:
    """Places an application on nodes; ``on_gpu``: each shard takes a GPU.

    Raises:
        PlacementError: the application does not fit; the message says what is missing.
    """
    placement, num_shards = config.placement, config.engine.tensor_parallel_size
    bundle = placement.shard_bundle(on_gpu=on_gpu)
    beside = config.beside_rank_0.values()
    for source in beside:
        if not _fits(demand := _demand(source), bundle):
            raise PlacementError(
                f"the {source.kind} drafter with {describe(demand)} does not fit beside rank 0, "
                f"which has {describe(bundle)}"
            )
    drafters = [
        (source.kind, _demand(source))
        for source in config.placed("actor").values()
        for _ in range(source.num_actors)
    ]
    demands = [bundle] * (placement.num_replicas * num_shards) + [each for _, each in drafters]
    if missing := shortage(demands, nodes):
        raise PlacementError(missing)
    free = [dict(node.resources) for node in nodes]
    replicas = []
    for _ in range(placement.num_replicas):
        places = _place_shards(placement, bundle, num_shards, free)
        if places is None:
            raise PlacementError(
                f"{num_shards} shards with {describe(bundle)} each ({placement.strategy}) "
                f"do not fit on the nodes, which have free: {_listing(free)}"
            )
        replicas.append(tuple(sorted(places, key=places.index)))
    placed = [(f"{each.kind} beside rank 0", ranks[0]) for ranks in replicas for each in beside]
    for kind, demand in drafters:
        where = _place_drafter(demand, free)
        if where is None:
            raise PlacementError(
                f"the {kind} drafter with {describe(demand)} does not fit on a node; "
                f"what is left free: {_listing(free)}"
            )
        placed.append((str(kind), where))
    left = tuple(Node(node.name, rest) for node, rest in zip(nodes, free, strict=True))
    return Plan(tuple(replicas), tuple(placed), left)


def describe(resources: dict[str, float]) -> str:
    """Describes resources in words, without the infinite ones."""
    known = {name: amount for name, amount in resources.items() if math.isfinite(amount)}
    return ", ".join(f"{amount:g} {name}" for name, amount in known.items()) or "nothing"


def shortage(demands: Sequence[dict[str, float]], nodes: Sequence[Node]) -> str:
    """Describes the first resource that all nodes together have too little of; empty: none."""
    for name in dict.fromkeys(name for demand in demands for name in demand):
        needed = sum(demand.get(name, 0.0) for demand in demands)
        free = sum(node.resources.get(name, 0.0) for node in nodes)
        if needed > free + _ROUNDING:
            return f"needs {needed:g} {name}, the cluster has {free:g} free"
    return ""


def _demand(source: DrafterConfig) -> dict[str, float]:
    """Returns the Ray resources that one drafter of a source needs."""
    demand = {"GPU": source.num_gpus, "CPU": source.num_cpus, **source.resources}
    return {name: amount for name, amount in demand.items() if amount}


def _place_shards(
    placement: PlacementConfig,
    bundle: dict[str, float],
    num_shards: int,
    free: list[dict[str, float]],
) -> list[int] | None:
    """Returns the node of each shard, and subtracts it from ``free``; None: they do not fit."""
    strategy = placement.strategy
    if strategy == "STRICT_PACK":
        together = {name: amount * num_shards for name, amount in bundle.items()}
        best = _best(together, free, range(len(free)))
        if best is None:
            return None
        _take(together, free[best])
        return [best] * num_shards
    places: list[int] = []
    for _ in range(num_shards):
        best = _best(bundle, free, places[-1:]) if strategy == "PACK" else None
        if best is None:
            best = _best(bundle, free, [i for i in range(len(free)) if i not in places])
        if best is None and strategy == "SPREAD":
            best = _best(bundle, free, list(dict.fromkeys(places)))
        if best is None:
            return None
        _take(bundle, free[best])
        places.append(best)
    return places


def _place_drafter(demand: dict[str, float], free: list[dict[str, float]]) -> int | None:
    """Returns the node of a drafter, and subtracts it from ``free``; None: it does not fit."""
    fitting = [i for i, resources in enumerate(free) if _fits(demand, resources)]
    if "GPU" not in demand:
        fitting.sort(key=lambda i: "GPU" in free[i])
    if not fitting:
        return None
    _take(demand, free[fitting[0]])
    return fitting[0]


def _best(
    demand: dict[str, float], free: list[dict[str, float]], candidates: Sequence[int]
) -> int | None:
    """Returns the candidate with the largest sum of shares left free; None: none fits."""

    def score(index: int) -> float:
        return sum(1 - amount / free[index][name] for name, amount in demand.items())

    return max((i for i in candidates if _fits(demand, free[i])), key=score, default=None)


def _fits(demand: dict[str, float], free: dict[str, float]) -> bool:
    return all(amount <= free.get(name, 0.0) + _ROUNDING for name, amount in demand.items())


def _take(demand: dict[str, float], free: dict[str, float]) -> None:
    for name, amount in demand.items():
        free[name] -= amount


def _listing(free: list[dict[str, float]]) -> str:
    return "; ".join(map(describe, free))
