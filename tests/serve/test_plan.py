from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from specserve.core.config import AppConfig, parse
from specserve.core.errors import ConfigError, PlacementError
from specserve.serve.config_file import read
from specserve.serve.plan import Node, Plan, described_nodes, plan

CONFIGS = Path(__file__).parents[2] / "configs"
DRAFTER = {"kind": "mtp", "num_gpus": 1}


def config(
    num_shards: int, strategy: str = "PACK", speculation: Any = (), **placement: Any
) -> AppConfig:
    return parse(
        {
            "model": {"path": "m"},
            "engine": {"tensor_parallel_size": num_shards},
            "placement": {"strategy": strategy, **placement},
            "speculation": list(speculation),
        }
    )


def nodes(*num_gpus: int) -> list[Node]:
    return [Node(f"n{i}", {"GPU": float(n), "CPU": 64.0}) for i, n in enumerate(num_gpus)]


def placed(num_shards: int, strategy: str, *num_gpus: int) -> tuple[int, ...]:
    (ranks,) = plan(config(num_shards, strategy), nodes(*num_gpus), on_gpu=True).replicas
    return ranks


def refusal(config: AppConfig, there: list[Node]) -> str:
    with pytest.raises(PlacementError) as caught:
        plan(config, there, on_gpu=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pack_fills_one_node_after_another_from_the_largest() -> None:
    assert placed(16, "PACK", 8, 8) == (0,) * 8 + (1,) * 8
    assert placed(16, "PACK", 1, 8, 8) == (1,) * 8 + (2,) * 8
    assert placed(10, "PACK", 4, 8) == (1,) * 8 + (0,) * 2
    assert placed(4, "PACK", 2, 8) == (1,) * 4


def test_spread_uses_all_nodes_and_orders_ranks_by_node() -> None:
    assert placed(2, "SPREAD", 8, 8) == (0, 1)
    assert placed(5, "SPREAD", 8, 8) == (0, 0, 0, 1, 1)
    assert placed(3, "SPREAD", 1, 4) == (1, 1, 0)


def test_strict_strategies_are_kept() -> None:
    assert placed(4, "STRICT_PACK", 2, 8) == (1,) * 4
    assert placed(2, "STRICT_SPREAD", 8, 4) == (0, 1)
    assert refusal(config(8, "STRICT_PACK"), nodes(4, 4)) == (
        "8 shards with 1 GPU, 1 CPU each (STRICT_PACK) do not fit on the nodes, "
        "which have free: 4 GPU, 64 CPU; 4 GPU, 64 CPU"
    )
    assert "3 shards with 1 GPU, 1 CPU each (STRICT_SPREAD)" in refusal(
        config(3, "STRICT_SPREAD"), nodes(8, 8)
    )


def test_missing_resources_are_reported_in_one_line() -> None:
    assert refusal(config(16), nodes(8)) == "needs 16 GPU, the cluster has 8 free"
    with_drafter = config(16, speculation=[DRAFTER])
    assert refusal(with_drafter, nodes(8, 8)) == "needs 17 GPU, the cluster has 16 free"
    marked = config(2, shard_resources={"fast": 1})
    assert refusal(marked, nodes(8)) == "needs 2 fast, the cluster has 0 free"


def test_a_shard_that_does_not_fit_on_one_node_is_refused() -> None:
    odd = [Node("a", {"CPU": 3.0}), Node("b", {"CPU": 3.0})]
    with pytest.raises(PlacementError, match=r"3 shards with 2 CPU each .* 1 CPU; 1 CPU$"):
        plan(config(3, num_cpus_per_shard=2), odd, on_gpu=False)


def test_replicas_and_drafters_share_the_nodes() -> None:
    two = config(8, speculation=[DRAFTER | {"num_actors": 2}], num_replicas=2)
    found = plan(two, nodes(8, 8, 2), on_gpu=True)
    assert found.replicas == ((0,) * 8, (1,) * 8)
    assert found.drafters == (("mtp", 2), ("mtp", 2))
    assert [node.resources["GPU"] for node in found.left] == [0, 0, 0]
    whole = config(6, speculation=[DRAFTER | {"resources": {"mark": 1}}])
    there = [Node("a", {"GPU": 6.0, "CPU": 8.0, "mark": 1.0}), Node("b", {"GPU": 2.0, "CPU": 8.0})]
    assert "the mtp drafter with 1 GPU, 1 CPU, 1 mark does not fit" in refusal(whole, there)


def test_marks_keep_shards_and_drafters_on_their_nodes() -> None:
    parts = config(
        2,
        speculation=[DRAFTER | {"resources": {"drafter": 0.5}}],
        shard_resources={"engine": 0.01},
    )
    has = {"GPU": 4.0, "CPU": 8.0}
    there = [Node("a", {**has, "drafter": 1.0}), Node("b", {**has, "engine": 0.02})]
    found = plan(parts, there, on_gpu=True)
    assert (found.replicas, found.drafters) == (((1, 1),), (("mtp", 0),))


@pytest.mark.parametrize("name", ["r1_mtp", "r1_mtp_hybrid", "r1_mtp_int8"])
def test_r1_needs_two_nodes_of_8_gpus_and_one_gpu_for_mtp(name: str) -> None:
    (application,) = read(CONFIGS / f"{name}.yaml").applications
    engine = {"GPU": 8.0, "CPU": 32.0, "specserve_engine": 1.0}
    drafter = {"GPU": 1.0, "CPU": 4.0, "specserve_drafter": 1.0}
    there = [Node("a", drafter), Node("b", engine), Node("c", engine)]
    found = plan(application.config, there, on_gpu=True)
    assert (found.replicas, found.drafters) == (((1,) * 8 + (2,) * 8,), (("mtp", 0),))
    assert refusal(application.config, there[1:]) == "needs 17 GPU, the cluster has 16 free"


def test_a_cpu_drafter_is_not_placed_on_a_gpu_node() -> None:
    there, on_gpu = described_nodes("1x8+1x4cpu", ())
    found = plan(config(2, speculation=[{"kind": "mtp"}]), there, on_gpu=on_gpu)
    assert (found.replicas, found.drafters) == (((0, 0),), (("mtp", 1),))


def test_a_drafter_beside_rank_0_uses_its_node_and_no_more_resources() -> None:
    beside = {"kind": "mtp", "placement": "beside_rank_0", "num_gpus": 0.1}
    found = plan(config(8, speculation=[beside], num_replicas=2), nodes(8, 8), on_gpu=True)
    assert found.drafters == (("mtp beside rank 0", 0), ("mtp beside rank 0", 1))
    assert [node.resources for node in found.left] == [{"GPU": 0, "CPU": 56}] * 2
    with pytest.raises(PlacementError, match=r"0\.1 GPU, 1 CPU .* beside rank 0, which has 1 CPU$"):
        plan(config(1, speculation=[beside]), nodes(8), on_gpu=False)


def test_an_in_engine_drafter_needs_no_resources() -> None:
    inside = config(8, speculation=[{"kind": "mtp", "placement": "in_engine"}])
    found: Plan = plan(inside, nodes(8), on_gpu=True)
    assert found.drafters == ()


def test_a_cluster_is_described_by_groups_of_nodes() -> None:
    there, on_gpu = described_nodes("2x8+1x16cpu", ["mark"])
    assert on_gpu
    assert [node.name for node in there] == ["node 1", "node 2", "node 3"]
    assert there[1].resources == {"GPU": 8, "CPU": math.inf, "mark": math.inf}
    assert there[2].resources == {"CPU": 16, "mark": math.inf}
    assert not described_nodes("2x2cpu", ())[1]


@pytest.mark.parametrize("cluster", ["", "8", "2x", "0x8", "2x8+", "2x8gpu", "-1x8", "2x8,1x1"])
def test_an_invalid_description_is_refused(cluster: str) -> None:
    with pytest.raises(ConfigError, match=r"--cluster: .* is not allowed; allowed: running, or"):
        described_nodes(cluster, ())
