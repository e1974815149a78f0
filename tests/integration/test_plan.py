"""The plan agrees with Ray and vLLM. The nodes declare GPUs that they do not have."""

from __future__ import annotations

import pytest

from specserve.core.config import parse
from specserve.serve.plan import Node, plan
from tests.integration.cluster import running_cluster
from tests.integration.host_process import ask_once

pytestmark = pytest.mark.timeout(300)

CASES = [
    ("PACK", 16),
    ("PACK", 8),
    ("PACK", 10),
    ("STRICT_PACK", 8),
    ("SPREAD", 2),
    ("SPREAD", 7),
    ("STRICT_SPREAD", 2),
]
APPLICATIONS = [
    {
        "model": {"path": "m"},
        "engine": {"tensor_parallel_size": num_shards},
        "placement": {"strategy": strategy, "timeout_s": 60.0},
    }
    for strategy, num_shards in CASES
]


def shares(nodes_of_ranks: list[str] | list[int]) -> list[int]:
    """Numbers of consecutive ranks on a node, sorted because Ray chooses among equal nodes."""
    shares: list[int] = []
    for rank, node in enumerate(nodes_of_ranks):
        if rank and node == nodes_of_ranks[rank - 1]:
            shares[-1] += 1
        else:
            shares.append(1)
    return sorted(shares)


def test_ranks_are_on_the_nodes_that_the_plan_says() -> None:
    with running_cluster(16, 16, num_gpus=8) as cluster:
        answer = ask_once(cluster, "tests.integration.planner", APPLICATIONS)
    nodes = [Node(**node) for node in answer["nodes"]]
    assert [node.resources for node in nodes] == [{"CPU": 16, "GPU": 8}] * 2
    for args, places in zip(APPLICATIONS, answer["places"], strict=True):
        planned = plan(parse(args), nodes, on_gpu=True)
        assert shares(places) == shares(list(planned.replicas[0])), args
    assert shares(answer["places"][0]) == [8, 8]
