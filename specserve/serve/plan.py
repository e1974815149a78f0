"""Which shard and which drafter would run on which node, worked out without a cluster.

Shards are placed by the rules of Ray's placement groups: of the nodes with room the one that keeps
the largest share of its resources free, and of equal ones any, here the first. A drafter may go to
any node with room, but not to one with GPUs while there are others, if it needs none; here too to
the first.
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
"""Sums of resources such as 0.01 are not exact; Ray counts in units of 0.0001."""

_GROUP = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})(cpu)?")
_GROUPS = "running, or groups NODESxGPUS and NODESxCPUScpu, such as 2x8 or 2x8+1x16cpu"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster.

    Attributes:
        name: as shown.
        resources: what it has free, by Ray's names; infinite where that is not known.
    """

    name: str
    resources: dict[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where an application's parts run; nodes are told by their index.

    Attributes:
        replicas: for each replica the nodes of its shards, by rank. Ranks of one node stand
            together; which node has the first ones, vLLM decides: the replica's own, if it has any.
        drafters: each drafter in words, and its node.
        left: the nodes, with what is left of their resources.
    """

    replicas: tuple[tuple[int, ...], ...]
    drafters: tuple[tuple[str, int], ...]
    left: tuple[Node, ...]


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
            raise ConfigError("--cluster", cluster, _GROUPS)
        amount, is_cpu = float(match[2]), match[3] is not None
        on_gpu |= not is_cpu
        has = {"CPU": amount} if is_cpu else {"GPU": amount, "CPU": math.inf}
        has |= dict.fromkeys(marks, math.inf)
        nodes += [Node(f"node {len(nodes) + i + 1}", has) for i in range(int(match[1]))]
    return nodes, on_gpu


def plan(config: AppConfig, nodes: Sequence[Node], *, on_gpu: bool) -> Plan:
    """Places an application on nodes; ``on_gpu`` is whether a shard takes a GPU.

    Raises:
        PlacementError: it does not fit; says what is missing.
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
    rooms = [dict(node.resources) for node in nodes]
    replicas = []
    for _ in range(placement.num_replicas):
        places = _place_shards(placement, bundle, num_shards, rooms)
        if places is None:
            raise PlacementError(
                f"{num_shards} shards with {describe(bundle)} each ({placement.strategy}) "
                f"do not fit on the nodes, which have free: {_listing(rooms)}"
            )
        replicas.append(tuple(sorted(places, key=places.index)))
    placed = [(f"{each.kind} beside rank 0", ranks[0]) for ranks in replicas for each in beside]
    for kind, demand in drafters:
        where = _place_drafter(demand, rooms)
        if where is None:
            raise PlacementError(
                f"the {kind} drafter with {describe(demand)} does not fit on a node; "
                f"what is left free: {_listing(rooms)}"
            )
        placed.append((str(kind), where))
    left = tuple(Node(node.name, room) for node, room in zip(nodes, rooms, strict=True))
    return Plan(tuple(replicas), tuple(placed), left)


def describe(resources: dict[str, float]) -> str:
    """Resources in words, as far as they are known."""
    known = {name: amount for name, amount in resources.items() if math.isfinite(amount)}
    return ", ".join(f"{amount:g} {name}" for name, amount in known.items()) or "nothing"


def shortage(demands: Sequence[dict[str, float]], nodes: Sequence[Node]) -> str:
    """Which resource all nodes together have too little of, in words; empty: none."""
    for name in dict.fromkeys(name for demand in demands for name in demand):
        needed = sum(demand.get(name, 0.0) for demand in demands)
        free = sum(node.resources.get(name, 0.0) for node in nodes)
        if needed > free + _ROUNDING:
            return f"needs {needed:g} {name}, the cluster has {free:g} free"
    return ""


def _demand(source: DrafterConfig) -> dict[str, float]:
    """The Ray resources that one drafter of a source needs."""
    demand = {"GPU": source.num_gpus, "CPU": source.num_cpus, **source.resources}
    return {name: amount for name, amount in demand.items() if amount}


def _place_shards(
    placement: PlacementConfig,
    bundle: dict[str, float],
    num_shards: int,
    rooms: list[dict[str, float]],
) -> list[int] | None:
    """The node of each shard, which is taken out of ``rooms``; None: they do not fit."""
    strategy = placement.strategy
    if strategy == "STRICT_PACK":
        together = {name: amount * num_shards for name, amount in bundle.items()}
        best = _best(together, rooms, range(len(rooms)))
        if best is None:
            return None
        _take(together, rooms[best])
        return [best] * num_shards
    places: list[int] = []
    for _ in range(num_shards):
        best = _best(bundle, rooms, places[-1:]) if strategy == "PACK" else None
        if best is None:
            best = _best(bundle, rooms, [i for i in range(len(rooms)) if i not in places])
        if best is None and strategy == "SPREAD":
            best = _best(bundle, rooms, list(dict.fromkeys(places)))
        if best is None:
            return None
        _take(bundle, rooms[best])
        places.append(best)
    return places


def _place_drafter(demand: dict[str, float], rooms: list[dict[str, float]]) -> int | None:
    """The node of a drafter, which is taken out of ``rooms``; None: no room."""
    fitting = [i for i, room in enumerate(rooms) if _fits(demand, room)]
    if "GPU" not in demand:
        fitting.sort(key=lambda i: "GPU" in rooms[i])
    if not fitting:
        return None
    _take(demand, rooms[fitting[0]])
    return fitting[0]


def _best(
    demand: dict[str, float], rooms: list[dict[str, float]], candidates: Sequence[int]
) -> int | None:
    """The candidate that keeps most free, as a sum of each resource's share; None: no room."""

    def score(index: int) -> float:
        return sum(1 - amount / rooms[index][name] for name, amount in demand.items())

    return max((i for i in candidates if _fits(demand, rooms[i])), key=score, default=None)


def _fits(demand: dict[str, float], room: dict[str, float]) -> bool:
    return all(amount <= room.get(name, 0.0) + _ROUNDING for name, amount in demand.items())


def _take(demand: dict[str, float], room: dict[str, float]) -> None:
    for name, amount in demand.items():
        room[name] -= amount


def _listing(rooms: list[dict[str, float]]) -> str:
    return "; ".join(describe(room) for room in rooms)
