"""A drafter on a part of rank 0's GPU. The nodes declare GPUs that they do not have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.cluster import running_cluster
from tests.integration.host_process import ask_once

pytestmark = pytest.mark.timeout(300)

SHARE = 0.25
CASES = [("PACK", 4), ("SPREAD", 3), ("STRICT_PACK", 1)]
APPLICATIONS = [
    {
        "model": {"path": "m"},
        "engine": {"tensor_parallel_size": num_shards, "gpu_memory_utilization": 0.7},
        "speculation": [{"kind": "mtp", "placement": "beside_rank_0", "num_gpus": SHARE}],
        "placement": {"strategy": strategy, "timeout_s": 60.0},
    }
    for strategy, num_shards in CASES
]


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """The outcome for each application."""
    with running_cluster(2, 2, num_gpus=2) as cluster:
        found: list[dict[str, Any]] = ask_once(
            cluster, "tests.integration.beside_rank_0", APPLICATIONS
        )
    assert len(found) == len(CASES)
    return found


def test_shards_have_a_gpu_each_and_the_drafter_shares_rank_0s(
    answers: list[dict[str, Any]],
) -> None:
    for (strategy, num_shards), answer in zip(CASES, answers, strict=True):
        gpus = {(rank["node"], *rank["gpus"]) for rank in answer["ranks"]}
        assert len(gpus) == num_shards, strategy
        for drafter in answer["drafters"]:
            assert drafter["node"] == answer["ranks"][0]["node"]
            assert drafter["gpus"] == answer["ranks"][0]["gpus"]


def test_the_drafter_sees_only_rank_0s_gpu(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        (gpu,) = answer["ranks"][0]["gpus"]
        assert [drafter["visible"] for drafter in answer["drafters"]] == [gpu, gpu]


def test_rank_0_and_the_drafter_fill_a_gpu_and_other_ranks_leave_the_same_share(
    answers: list[dict[str, Any]],
) -> None:
    for (_, num_shards), answer in zip(CASES, answers, strict=True):
        assert answer["free"] == [0.0] + [SHARE] * (num_shards - 1)


def test_a_killed_drafter_restarts_on_the_same_gpu(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        first, second = answer["drafters"]
        assert first["pid"] != second["pid"]
        assert first | {"pid": 0} == second | {"pid": 0}
