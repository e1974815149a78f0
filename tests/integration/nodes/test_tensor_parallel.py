from __future__ import annotations

import psutil
import pytest

from tests.integration.api import Api
from tests.integration.cluster import Deployment, eventually
from tests.integration.running import running_stream
from tests.integration.stage import NUM_CPUS, Stage

pytestmark = pytest.mark.timeout(900)

PROMPTS = ["def add(a, b):\n    return a + b\n" * 5, "x = 1\ny = 2\n" * 9, "import os\n"]


def tokens(api: Api) -> list[list[int]]:
    """What greedy decoding makes of the prompts."""
    answers = [api.complete(prompt=p, max_tokens=96, return_token_ids=True) for p in PROMPTS]
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.fixture
def tokens_of_one_shard(one_shard: Deployment) -> list[list[int]]:
    """The same from the application with one shard, before that with two is served."""
    return tokens(Api(one_shard.base_url()))


def node_of(process: psutil.Process) -> str:
    """Which raylet started the process."""
    parents = [parent.pid for parent in process.parents() if "raylet" in parent.name()]
    assert len(parents) == 1
    return str(parents[0])


def test_two_shards_on_two_nodes_give_the_tokens_of_one(
    tokens_of_one_shard: list[list[int]], two_shards: Deployment
) -> None:
    api = Api(two_shards.base_url())
    shards = two_shards.cluster.shards()
    assert len({node_of(shard) for shard in shards}) == len(shards) == 2
    before = api.counts()
    assert tokens(api) == tokens_of_one_shard
    assert api.counts().since(before).accepted_tokens > 0


def test_shards_that_fit_nowhere_are_told_in_one_line(two_shards: Deployment) -> None:
    def line() -> str | None:
        lines = two_shards.output().splitlines()
        return next((line for line in lines if "error: placement:" in line), None)

    said = two_shards.eventually(line, "the placement error", 120)
    assert "8 shards with 3 CPU each (PACK) did not fit within 3 s: needs 24 CPU, the " in said
    assert f"nodes: 2 x ({NUM_CPUS} CPU); free in all: " in said
    two_shards.eventually(
        lambda: len(two_shards.cluster.replicas()) == 1, "nothing left of the application", 60
    )
    two_shards.eventually(
        lambda: "DEPLOY_FAILED" in two_shards.status("large"), "the application has failed", 60
    )


def test_a_running_request_is_finished_before_its_replica_goes(
    two_shards: Deployment, nodes: Stage
) -> None:
    api = Api(two_shards.base_url())
    with running_stream(
        api, prompt="one two", max_tokens=300, ignore_eos=True, vllm_xargs={"speculation": "off"}
    ) as outcome:
        two_shards.delete("main")
        assert outcome(120) is None, two_shards.tail()
    eventually(lambda: not two_shards.cluster.engine_processes(), "all engine processes gone", 60)
    nodes.clear()
