"""Requests that run while a test disturbs the server, and waits for the outcome."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

from tests.integration.api import MODEL, OFF, TIMEOUT_S, Api
from tests.integration.applications import MAX_NUM_SEQS
from tests.integration.cluster import READY_S, Deployment, is_alive, is_healthy

LONG: dict[str, Any] = {
    "prompt": "one two three",
    "max_tokens": 1900,
    "ignore_eos": True,
    "vllm_xargs": OFF,
}
SEVERAL: dict[str, Any] = {"n": MAX_NUM_SEQS, "temperature": 1.0}
"""Several answers at once, so that there is time to cut them off before they are complete."""

ERROR_S = 60.0
"""A request whose server died must get its error within this time."""


def replaced(app: Deployment, before: list[psutil.Process], application: str = "") -> None:
    """Waits until an application has a new replica and no process of the old one.

    Args:
        app: its deployment.
        before: the application's processes so far.
        application: its name, if there are other applications.
    """

    def is_new() -> bool:
        processes = app.cluster.engine_processes(application)
        is_gone = not any(is_alive(process) for process in before)
        return is_gone and len(processes) == len(before) and is_healthy(app.base_url())

    app.eventually(is_new, f"only the new replica, {before} gone", READY_S)


GENERATED: dict[str, Any] = {
    "inputs": LONG["prompt"],
    # The text repeats itself, and no end token comes.
    "parameters": {"max_new_tokens": LONG["max_tokens"], "repetition_penalty": 0.5},
    "vllm_xargs": OFF,
}
"""The same for the generation API."""


def num_answers_finished_after_a_disconnect(
    api: Api, app: Deployment, path: str, body: Mapping[str, Any]
) -> float:
    """Requests long answers, disconnects once they are being decoded, and waits for their end.

    There are several requests, so that no answer is complete before the disconnect.

    Args:
        api: a client of the application.
        app: its deployment.
        path: the route.
        body: the request.

    Returns:
        The number of answers that the engine decoded to their full length.
    """
    before = finished(api)

    async def disconnect() -> None:
        async with httpx.AsyncClient(base_url=api.base_url, timeout=TIMEOUT_S) as client:
            asked = {"model": MODEL, **body}
            requests = [
                asyncio.create_task(client.post(path, json=asked)) for _ in range(MAX_NUM_SEQS)
            ]
            await asyncio.to_thread(
                app.eventually,
                lambda: num_running(api) > 0,
                "it is generating",
                60,
            )
            assert all(each.cancel() for each in requests), "an answer came before the disconnect"
            await asyncio.wait(requests)

    asyncio.run(disconnect())
    app.eventually(lambda: num_running(api) == 0, "nothing is running", 60)
    return finished(api) - before


@contextmanager
def running_stream(api: Api, **body: Any) -> Iterator[Callable[[float], Exception | None]]:
    """A streamed request in the background. Its answer has begun.

    Yields:
        A function that waits some seconds for the end: None if it succeeded, else its error.
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


def num_running(api: Api) -> float:
    """Number of requests that are being decoded."""
    return api.metric("vllm:num_requests_running")


def finished(api: Api) -> float:
    """Number of answers so far that ended at ``max_tokens``."""
    return api.metric("vllm:request_success_total", finished_reason="length")
