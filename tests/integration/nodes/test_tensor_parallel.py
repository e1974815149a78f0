from __future__ import annotations

import queue

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.api import Api
from tests.integration.cluster import Deployment, eventually, model_path
from tests.integration.running import LONG, running_stream
from tests.integration.stage import NUM_CPUS, Stage

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 96
PROMPTS = ["def add(a, b):\n    return a + b\n" * 5, "x = 1\ny = 2\n" * 9, "import os\n"]


def tokens(api: Api) -> list[list[int]]:
    """Greedy output of the served model for the prompts."""
    asked = {"max_tokens": NUM_TOKENS, "return_token_ids": True}
    answers = [api.complete(prompt=prompt, **asked) for prompt in PROMPTS]
    return [answer["choices"][0]["token_ids"] for answer in answers]


def tokens_of_transformers() -> list[list[int]]:
    """Greedy output of transformers, which has no shards."""
    path = model_path("demo-draft")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        asked = tokenizer(prompt, return_tensors="pt")
        (tokens,) = model.generate(**asked, max_new_tokens=NUM_TOKENS, do_sample=False)
        found.append(tokens[asked["input_ids"].shape[1] :].tolist())
    return found


def node_of(process: psutil.Process) -> str:
    """Process id of the raylet that started the process."""
    parents = [parent.pid for parent in process.parents() if "raylet" in parent.name()]
    assert len(parents) == 1
    return str(parents[0])


def test_two_shards_on_two_nodes_give_the_tokens_of_transformers(two_shards: Deployment) -> None:
    api = Api(two_shards.base_url())
    shards = two_shards.cluster.shards()
    assert len({node_of(shard) for shard in shards}) == len(shards) == 2
    before = api.counts()
    assert tokens(api) == tokens_of_transformers()
    assert api.counts().since(before).accepted_tokens > 0


def test_shards_that_do_not_fit_give_a_one_line_error(two_shards: Deployment) -> None:
    def line() -> str | None:
        lines = two_shards.output().splitlines()
        return next((line for line in lines if "error: placement:" in line), None)

    said = two_shards.eventually(line, "the placement error", 120)
    assert "4 shards with 6 CPU each (PACK) did not fit within 3 s: needs 24 CPU, the " in said
    assert f"nodes: 2 x ({NUM_CPUS} CPU); free in all: " in said
    two_shards.eventually(
        lambda: len(two_shards.cluster.replicas()) == 1, "nothing left of the application", 60
    )
    two_shards.eventually(
        lambda: "DEPLOY_FAILED" in two_shards.status("large"), "the application has failed", 60
    )


def test_a_running_request_finishes_before_its_replica_stops(
    two_shards: Deployment, nodes: Stage
) -> None:
    api = Api(two_shards.base_url())
    body = LONG | {"max_tokens": 300}  # the replica has 30 s to finish
    with two_shards.deleting("main") as delete, running_stream(api, **body) as outcome:
        delete()
        with pytest.raises(queue.Empty):  # it is still running
            outcome(0)
        assert outcome(120) is None, two_shards.tail()
    eventually(lambda: not two_shards.cluster.engine_processes(), "all engine processes gone", 60)
    nodes.clear()
