from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.api import MODEL, Api, StreamError
from tests.integration.applications import MAX_NUM_SEQS, MAX_QUEUED
from tests.integration.cluster import Deployment, eventually, suspend
from tests.integration.running import (
    ERROR_S,
    GENERATED,
    LONG,
    SEVERAL,
    num_answers_finished_after_a_disconnect,
    replaced,
    running_stream,
)
from tests.integration.stage import STEP_S

pytestmark = pytest.mark.timeout(900)

MAIN = "main"
"""Name of the application at the root."""


@pytest.fixture
def small(shared: Deployment) -> Iterator[Api]:
    """A client of an application with a small batch and queue."""
    api = Api(shared.base_url("/drafter"))
    with api.http:
        yield api


@pytest.mark.parametrize("stream", [True, False])
def test_excess_requests_get_503_with_retry_after_and_the_others_are_served(
    small: Api, stream: bool
) -> None:
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"model": MODEL, **LONG, "max_tokens": 300, "stream": stream, **usage}
    admitted = MAX_NUM_SEQS + MAX_QUEUED
    with ThreadPoolExecutor(3 * admitted) as pool:
        burst = [
            pool.submit(small.http.post, "/v1/completions", json=body) for _ in range(3 * admitted)
        ]
        answers = [request.result() for request in burst]
    refused = [answer for answer in answers if answer.status_code == 503]
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) + len(served) == len(answers)
    assert len(served) >= admitted
    assert refused
    for answer in refused:
        assert answer.headers["Retry-After"] == "3"
        assert answer.json()["error"]["code"] == 503
    for answer in served:
        assert '"completion_tokens":300' in answer.text.replace(" ", "")
    assert small.complete(prompt="x", max_tokens=4)["choices"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {**LONG, **SEVERAL}), ("/generate", GENERATED)],
    ids=["completions", "generate"],
)
def test_a_disconnect_ends_the_request(
    api: Api, shared: Deployment, path: str, body: dict[str, Any], stream: bool
) -> None:
    asked = {**body, "stream": stream}
    assert num_answers_finished_after_a_disconnect(api, shared, path, asked) == 0


@pytest.mark.parametrize(
    ("victim", "end"),
    [("engine_cores", "kill"), ("engine_cores", "suspend"), ("replicas", "kill")],
    ids=["core dies", "core hangs", "replica dies"],
)
def test_a_replica_is_replaced_when_it_dies_or_its_engine_core_fails(
    api: Api, shared: Deployment, victim: str, end: str
) -> None:
    cluster = shared.cluster
    before = cluster.engine_processes(MAIN)
    assert len(before) == 2
    assert not cluster.shards()
    with running_stream(api, **LONG, **SEVERAL) as outcome:
        (process,) = getattr(cluster, victim)(MAIN)
        getattr(process, end)()
        error = outcome(STEP_S + ERROR_S)
    assert isinstance(error, StreamError | httpx.HTTPError), "the stream ended without an error"

    replaced(shared, before, MAIN)
    answer = api.complete(prompt="x = 1\n", max_tokens=8)
    assert answer["usage"]["completion_tokens"] == 8


def test_ctrl_c_ends_everything_despite_a_running_request_and_hanging_stores(
    ended: Deployment,
) -> None:
    cluster = ended.cluster
    stores = cluster.processes("ray::TrieStore")
    assert stores
    for store in stores:
        suspend(store)
    try:
        Api(ended.base_url("/two")).complete(prompt="class A:\n", max_tokens=60, ignore_eos=True)
        with running_stream(Api(ended.base_url()), **LONG, **SEVERAL) as outcome:
            ended.interrupt()
            assert ended.wait(120) == 0
            outcome(60)
        eventually(lambda: not cluster.engine_processes(), "all engine processes gone", 60)
        eventually(lambda: not cluster.processes("bin/haproxy"), "HAProxy gone", 60)
    finally:
        for store in stores:
            store.resume()
    logs = (cluster.folder / "session_latest/logs").glob("worker-*.out")
    said = "".join(log.read_text() for log in logs)
    assert "The draft memory did not take all that this replica learned last" in said
