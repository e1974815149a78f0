"""configs/two_nodes.yaml on two hosts. Tests cut the link and kill the second host."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from specserve.compare.engine_process import EngineProcess
from specserve.compare.prompts import load_tokenizer
from specserve.core.config import parse
from specserve.engine.generation import Job, Sampling
from specserve.engine.methods import parse_method
from tests.integration.api import MODEL, Api, StreamError
from tests.integration.cluster import READY_S, eventually, is_healthy, model_path
from tests.integration.hosts import (
    DRAIN_S,
    HEAD,
    ROOT,
    WORKER,
    HostsDeployment,
    NoHostsError,
    TwoHosts,
)
from tests.integration.running import running_stream

pytestmark = pytest.mark.timeout(1500)

PROMPTS = ["def add(a, b):\n    return a + b\n" * 5, "x = 1\ny = 2\n" * 9, "import os\n"]
NUM_TOKENS = 64
WHOLE: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
LONG: dict[str, Any] = {
    "prompt": PROMPTS[0],
    "max_tokens": 1500,
    "ignore_eos": True,
    "vllm_xargs": {"speculation": "off"},
}
GIVEN_UP_S = 60.0
"""A request that uses the lost host gets its error within this time. That is two checks of 10 s in
deploy/node.env, plus a margin for a busy machine."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    try:
        hosts = TwoHosts()
    except NoHostsError as error:
        pytest.skip(str(error))
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()


@pytest.fixture(scope="module")
def content(hosts: TwoHosts) -> dict[str, Any]:
    """Content of the file, in float32 so that greedy tokens are always equal."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "configs/two_nodes.yaml").read_text())
    (application,) = content["applications"]
    args = application["args"]
    args["model"]["path"] = str(shutil.copytree(model_path("demo-base"), hosts.folder / "model"))
    args["engine"] |= {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20}
    args["placement"]["timeout_s"] = 10.0
    args["http"]["drain_timeout_s"] = DRAIN_S - 20
    return content


@pytest.fixture(scope="module")
def tokens_of_one_shard(content: dict[str, Any]) -> list[tuple[int, ...]]:
    """Greedy output for the prompts on one node, with one shard and without drafts."""
    args = content["applications"][0]["args"]
    config = parse({**args, "engine": {**args["engine"], "tensor_parallel_size": 1}})
    tokenizer = load_tokenizer(config.model.path)
    prompts = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in PROMPTS]
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
    jobs = [Job(tuple(prompt), sampling) for prompt in prompts]
    with EngineProcess(config, parse_method("none", config)) as engine:
        engine.wait_ready()
        return [completion.token_ids for completion in engine.run(jobs, 1).completions]


@pytest.fixture(scope="module")
def app(
    hosts: TwoHosts, content: dict[str, Any], tokens_of_one_shard: object
) -> Iterator[HostsDeployment]:
    """A deployment on the head. It starts after the engine with one shard has ended."""
    with HostsDeployment(hosts, content).running() as deployment:
        yield deployment


@pytest.fixture
def api(app: HostsDeployment) -> Iterator[Api]:
    api = Api(app.base_url())
    with api.http:
        yield api


def tokens(api: Api) -> list[tuple[int, ...]]:
    """Greedy output of the served model for the prompts."""
    answers = [api.complete(prompt=prompt, **WHOLE) for prompt in PROMPTS]
    return [tuple(answer["choices"][0]["token_ids"]) for answer in answers]


def is_on_worker(hosts: TwoHosts, process: psutil.Process) -> bool:
    return hosts.raylet_of_worker() in process.parents()


def pids(app: HostsDeployment) -> set[int]:
    return {process.pid for process in app.cluster.engine_processes()}


def await_rebuilt(app: HostsDeployment, old: set[int]) -> None:
    """Waits until a new replica answers and no process of the old one is left."""

    def is_new() -> bool:
        now = pids(app)
        return len(now) == 4 and not now & old and is_healthy(app.base_url())

    app.eventually(is_new, f"only the new replica, {old} gone", READY_S)


def await_remembered(api: Api) -> None:
    """Waits until a new replica has accepted drafts from the text of an earlier replica."""

    def accepted() -> int:
        xargs = {"speculation": "trie", "learn": 0}
        # The first two prompts repeat themselves and would get drafts from their own text.
        api.complete(prompt=PROMPTS[2], max_tokens=NUM_TOKENS, vllm_xargs=xargs)
        return api.counts("trie_cluster").accepted_tokens

    eventually(accepted, lambda: f"memory of an earlier replica; {api.speculation()}", 60)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("another token", f"the head at {HEAD}:6379 refuses this node's token"),
        ("", "no token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that holds it; the"),
    ],
)
def test_a_worker_without_the_clusters_token_is_refused_in_one_line(
    hosts: TwoHosts, tmp_path: Path, token: str, reason: str
) -> None:
    done = subprocess.run(
        hosts.on(hosts.worker, "deploy/worker.sh", HEAD),
        cwd=ROOT,
        env={**hosts.environment, "RAY_AUTH_TOKEN": token, "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout.startswith(f"worker.sh: {reason}")
    assert done.stdout.count("\n") == 1


def test_shards_on_two_hosts_write_what_one_shard_writes(
    api: Api, hosts: TwoHosts, tokens_of_one_shard: list[tuple[int, ...]]
) -> None:
    shards = hosts.shards()
    assert sorted(is_on_worker(hosts, shard) for shard in shards) == [False, True]
    actors = [*hosts.replicas(), *hosts.processes("TrieStore"), *hosts.processes("MtpDrafter")]
    assert len(actors) == 3
    assert not any(is_on_worker(hosts, actor) for actor in actors)
    assert tokens(api) == tokens_of_one_shard


def test_the_heads_proxy_streams(api: Api, tokens_of_one_shard: list[tuple[int, ...]]) -> None:
    with api.streaming(prompt=PROMPTS[0], **WHOLE) as events:
        parts = [event["choices"][0].get("token_ids") or [] for event in events]
    assert sum(map(bool, parts)) > 1
    assert tuple(token for part in parts for token in part) == tokens_of_one_shard[0]


def test_a_2_s_link_failure_only_delays_requests(
    api: Api, app: HostsDeployment, hosts: TwoHosts
) -> None:
    before = pids(app)
    with running_stream(api, **LONG | {"max_tokens": 100}) as outcome, hosts.cut(2):
        assert outcome(120) is None
    assert pids(app) == before


def test_a_drained_host_ends_its_requests_and_the_replica_is_rebuilt(
    api: Api, app: HostsDeployment, hosts: TwoHosts, tokens_of_one_shard: list[tuple[int, ...]]
) -> None:
    before = pids(app)
    with running_stream(api, **LONG | {"max_tokens": 800}) as outcome:
        hosts.stop_worker(DRAIN_S - 10)
        assert outcome(10) is None
    hosts.start_worker()
    await_rebuilt(app, before)
    assert tokens(api) == tokens_of_one_shard


def test_a_30_s_link_failure_fails_requests_and_the_replica_is_rebuilt(
    api: Api, app: HostsDeployment, hosts: TwoHosts, tokens_of_one_shard: list[tuple[int, ...]]
) -> None:
    before = pids(app)
    assert (
        tokens(api) == tokens_of_one_shard
    )  # also fills the draft memory, if this test runs alone
    with running_stream(api, **LONG) as outcome, hosts.cut(30):
        assert isinstance(outcome(GIVEN_UP_S), StreamError)
    hosts.await_worker_ended(120)  # Ray told it that it counts as dead
    hosts.start_worker()
    await_rebuilt(app, before)
    await_remembered(api)
    assert tokens(api) == tokens_of_one_shard


def test_a_dead_host_fails_requests_and_is_reported_missing_until_it_returns(
    api: Api, app: HostsDeployment, hosts: TwoHosts, tokens_of_one_shard: list[tuple[int, ...]]
) -> None:
    before, said = pids(app), len(app.output())
    assert tokens(api) == tokens_of_one_shard
    with running_stream(api, **LONG) as outcome:
        hosts.raylet_of_worker().kill()
        assert isinstance(outcome(GIVEN_UP_S), StreamError)
    hosts.await_worker_ended(60)
    missing = "2 shards with 1 CPU each (STRICT_SPREAD) did not fit within 10 s; nodes: 1 x ("
    app.eventually(lambda: missing in app.output()[said:], "the missing node is reported", 180)

    wait = {"x-request-timeout-seconds": "1"}  # Serve's header replaces the file's 600
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    assert api.http.post("/v1/completions", json=body, headers=wait).status_code == 408

    other = shutil.copytree(hosts.folder / "model", hosts.folder / "another")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    mounted = f'mount --bind {other} {hosts.folder}/model && exec "$@"'
    hosts.start_worker("sh", "-c", mounted, "sh")
    differs = f"error: node {WORKER} has checkpoint "
    app.eventually(lambda: differs in app.output(), "the other checkpoint is reported", 180)
    hosts.stop_worker()

    hosts.start_worker()
    await_rebuilt(app, before)
    await_remembered(api)
    assert tokens(api) == tokens_of_one_shard
