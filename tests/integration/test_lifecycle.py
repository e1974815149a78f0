from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from tests.integration.api import MODEL, OFF, TIMEOUT_S, Api, StreamError, fresh
from tests.integration.cluster import READY_S, Cluster, Deployment, is_healthy
from tests.integration.conftest import MAX_NUM_SEQS, MAX_QUEUED

pytestmark = pytest.mark.timeout(900)

LONG: dict[str, Any] = {
    "prompt": "one two three",
    "max_tokens": 1900,
    "ignore_eos": True,
    "vllm_xargs": OFF,
}
SEVERAL: dict[str, Any] = {"n": MAX_NUM_SEQS, "temperature": 1.0}
"""Answers at once, so that there is time to cut them off before they are whole."""
RUNNING = "vllm:num_requests_running"
ERROR_S = 60.0
"""A request whose server died must have its error within this time."""


def test_more_requests_than_fit_are_told_to_come_back_and_the_others_are_served(api: Api) -> None:
    body = {"model": MODEL, **LONG, "max_tokens": 300}
    admitted = MAX_NUM_SEQS + MAX_QUEUED
    with ThreadPoolExecutor(3 * admitted) as pool:
        burst = [
            pool.submit(api.http.post, "/v1/completions", json=body) for _ in range(3 * admitted)
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
        assert answer.json()["usage"]["completion_tokens"] == 300
    assert api.complete(prompt="x", max_tokens=4)["choices"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(api: Api, app: Deployment, stream: bool) -> None:
    assert answers_finished_for_a_client_that_goes_away(api, app, stream) == 0


@pytest.mark.parametrize("victim", ["shards", "engine_cores", "replicas"])
def test_a_killed_process_fails_its_requests_and_the_replica_is_replaced(
    api: Api, app: Deployment, victim: str
) -> None:
    cluster = app.cluster
    before = cluster.engine_processes()
    assert len(before) == 3
    with running_stream(api, **LONG, **SEVERAL) as outcome:
        (process,) = getattr(cluster, victim)()
        process.kill()
        error = outcome(ERROR_S)
    assert isinstance(error, StreamError | httpx.HTTPError), "the cut-off stream passed for whole"

    replaced_by(cluster, before, app)
    answer = api.complete(prompt="x = 1\n", max_tokens=8)
    assert answer["usage"]["completion_tokens"] == 8


def replaced_by(cluster: Cluster, before: list[psutil.Process], app: Deployment) -> None:
    """Waits until a new replica answers and nothing is left of the old one."""
    old = {process.pid for process in before}

    def is_new() -> bool:
        pids = {process.pid for process in cluster.engine_processes()}
        return len(pids) == 3 and not pids & old and is_healthy(app.base_url())

    app.eventually(is_new, f"a new replica alone, {old} gone", READY_S)


def answers_finished_for_a_client_that_goes_away(api: Api, app: Deployment, stream: bool) -> float:
    """Asks for long answers, leaves as soon as they are being written, and waits for their end.

    Returns:
        How many of the answers the engine wrote to their whole length.
    """
    before = answers_of_whole_length(api)

    async def go_away() -> None:
        body = {"model": MODEL, "stream": stream, **LONG, **SEVERAL}
        async with httpx.AsyncClient(base_url=api.base_url, timeout=TIMEOUT_S) as client:
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.to_thread(
                app.eventually, lambda: vllm_metric(api, RUNNING) > 0, "it is generating", 60
            )
            assert request.cancel(), "the answer was there too soon"
            await asyncio.wait([request])

    asyncio.run(go_away())
    app.eventually(lambda: vllm_metric(api, RUNNING) == 0, "nothing is running", 60)
    return answers_of_whole_length(api) - before


@contextmanager
def running_stream(api: Api, **body: Any) -> Iterator[Callable[[float], Exception | None]]:
    """A streamed request in the background, which has begun to answer.

    Yields:
        Waits so many seconds for the request's end: None if it ended well, else its error.
    """
    began = threading.Event()
    ended: queue.Queue[Exception | None] = queue.Queue()

    def consume() -> None:
        try:
            with Api(api.base_url).streaming(**body) as events:
                for _ in events:
                    began.set()
        except Exception as error:
            ended.put(error)
        else:
            ended.put(None)

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    assert began.wait(60), "the stream did not begin"
    yield lambda timeout_s: ended.get(timeout=timeout_s)


def answers_of_whole_length(api: Api) -> float:
    """Answers so far that ended at their ``max_tokens``."""
    return vllm_metric(api, "vllm:request_success_total", finished_reason="length")


def vllm_metric(api: Api, name: str, **labels: str) -> float:
    """One of vLLM's own metrics, from the replica, summed over the labels not given."""
    page = fresh(api.http, "/metrics").text
    return sum(
        sample.value
        for family in families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
