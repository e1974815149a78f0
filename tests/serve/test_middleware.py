from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.core.errors import EngineError
from specserve.serve.middleware import (
    DisconnectMiddleware,
    RetryAfterMiddleware,
    add_exception_handlers,
    answer_deep_nesting,
    answer_http_error,
    refuse_scaling,
    serve_fresh_metrics,
    with_cors_of,
)
from specserve.serve.shared import AS_OF


@pytest.mark.parametrize(("status", "header"), [(503, "7"), (429, "7"), (500, None), (200, None)])
def test_only_status_429_and_503_get_retry_after(status: int, header: str | None) -> None:
    application = RetryAfterMiddleware(Response(status_code=status), 7)
    assert TestClient(application).get("/").headers.get("Retry-After") == header


def test_an_answers_own_retry_after_is_kept() -> None:
    answer = Response(status_code=429, headers={"Retry-After": "30"})
    headers = TestClient(RetryAfterMiddleware(answer, 7)).get("/").headers
    assert headers.get_list("Retry-After") == ["30"]


class Metrics(Collector):
    """A metric of the current second that counts its refreshes and renderings."""

    def __init__(self) -> None:
        self.num_refreshed = self.num_rendered = self.second = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("second", "Now.")

    def collect(self) -> Iterator[Metric]:
        self.num_rendered += 1
        yield GaugeMetricFamily("second", "Now.", value=self.second)

    async def refresh(self) -> float:
        self.num_refreshed += 1
        return float(self.second)

    def application(self) -> Starlette:
        vllms = Mount("/metrics", Response("behind"))
        vllms.path_regex = re.compile("^/metrics(?P<path>.*)$")  # as in vLLM
        app = Starlette(routes=[vllms, Mount("/health", Response("behind"))])
        serve_fresh_metrics(app, self.refresh, self._registry)
        return app


@pytest.mark.parametrize(
    ("path", "root_path", "refreshed"),
    [("/metrics", "", 1), ("/demo/metrics/", "/demo", 1), ("/health", "", 0)],
)
def test_metrics_are_refreshed_under_a_route_prefix_too(
    path: str, root_path: str, refreshed: int
) -> None:
    metrics = Metrics()
    answer = TestClient(metrics.application(), root_path=root_path).get(path)
    assert ("second 0.0" in answer.text) == bool(refreshed) != (answer.text == "behind")
    assert metrics.num_refreshed == refreshed


def test_a_scrape_may_name_the_metrics_that_it_wants() -> None:
    client = TestClient(Metrics().application())
    assert client.get("/metrics?name[]=first").text == ""
    assert "second 0.0" in client.get("/metrics?name[]=first&name[]=second").text


def test_concurrent_scrapes_share_one_rendering() -> None:
    metrics = Metrics()

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(metrics.application())
        answers = []
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            for metrics.second in range(3):
                answers += await asyncio.gather(*(client.get("/metrics") for _ in range(10)))
        return answers

    answers = asyncio.run(run())
    values = [each.text.splitlines()[-1] for each in answers]
    assert values == [f"second {second}.0" for second in range(3) for _ in range(10)]
    assert [each.headers[AS_OF] for each in answers[::10]] == ["0.000000", "1.000000", "2.000000"]
    assert answers[0].headers["cache-control"] == "max-age=1"
    assert answers[0].headers["content-type"].startswith("text/plain; version=")
    assert metrics.num_rendered == 3


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/metrics", 405), ("OPTIONS", "/metrics", 405), ("GET", "/metricsx", 404),
     ("GET", "/metrics/x", 404), ("HEAD", "/metrics", 200)],
)  # fmt: skip
def test_other_requests_do_not_render_the_metrics(method: str, path: str, status: int) -> None:
    metrics = Metrics()
    client = TestClient(metrics.application())
    client.get("/metrics")
    assert client.request(method, path).status_code == status
    assert metrics.num_rendered == 1
    assert metrics.num_refreshed == (2 if method == "HEAD" else 1)


def caller(leaves: asyncio.Event | None = None) -> Receive:
    """Receives from a client that has sent its request and waits until it ``leaves``."""
    messages = iter([{"type": "http.request"}])
    leaves = leaves or asyncio.Event()

    async def receive() -> Message:
        if message := next(messages, None):
            return message
        await leaves.wait()
        return {"type": "http.disconnect"}

    return receive


async def ignore(message: Message) -> None:
    pass


async def no_answer(message: Message) -> None:
    raise AssertionError(message)


def test_the_application_sees_a_cancelled_call_as_a_disconnect() -> None:
    async def run() -> list[str]:
        received: list[str] = []
        began = asyncio.Event()

        async def listen(scope: Scope, receive: Receive, send: Send) -> None:
            while not received or received[-1] != "http.disconnect":
                received.append((await receive())["type"])
                began.set()

        call = asyncio.create_task(
            DisconnectMiddleware(listen)({"type": "http"}, caller(), no_answer)
        )
        await asyncio.wait_for(began.wait(), 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return received

    assert asyncio.run(run()) == ["http.request", "http.disconnect"]


@pytest.mark.parametrize("num_turns", range(9))
@pytest.mark.parametrize("message_first", [True, False])
def test_a_handler_gets_the_disconnect_before_its_cancellation(
    num_turns: int, message_first: bool
) -> None:
    async def run() -> str:
        leaves, began, seen = asyncio.Event(), asyncio.Event(), "nothing"

        async def listen(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal seen
            began.set()
            try:
                while (await receive())["type"] != "http.disconnect":
                    pass
                seen = "the message"
            except asyncio.CancelledError:
                seen = "the cancellation"

        call = asyncio.create_task(
            DisconnectMiddleware(listen)({"type": "http"}, caller(leaves), no_answer)
        )
        await asyncio.wait_for(began.wait(), 5)
        for is_message in (message_first, not message_first):
            leaves.set() if is_message else call.cancel()
            for _ in range(num_turns):
                await asyncio.sleep(0)
        await asyncio.wait([call], timeout=5)
        await asyncio.sleep(0.01)
        return seen

    assert asyncio.run(run()) == "the message"


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_stream_is_cancelled_when_its_client_is_gone(
    monkeypatch: pytest.MonkeyPatch, is_cancelled: bool, spec_version: str
) -> None:
    monkeypatch.setattr("specserve.serve.middleware._GONE_S", 0.05)

    async def run() -> str:
        leaves, ended = asyncio.Event(), "not"

        async def write() -> AsyncIterator[bytes]:
            nonlocal ended
            try:
                while True:
                    yield b"piece"
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                ended = "cancelled"
                raise

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                call.cancel() if is_cancelled else leaves.set()

        pieces = write()  # prevents garbage collection
        stream = DisconnectMiddleware(StreamingResponse(pieces))
        scope = {"type": "http", "asgi": {"spec_version": spec_version}}
        call = asyncio.create_task(stream(scope, caller(leaves), send))
        await asyncio.wait([call], timeout=5)
        assert call.cancelled() == is_cancelled
        await asyncio.sleep(0.1)
        return ended

    assert asyncio.run(run()) == "cancelled"


def test_a_background_task_survives_the_disconnect() -> None:
    async def run() -> bool:
        leaves, is_done = asyncio.Event(), False

        async def work() -> None:
            nonlocal is_done
            leaves.set()
            await asyncio.sleep(0.01)
            is_done = True

        answer = Response("ok", background=BackgroundTask(work))
        await DisconnectMiddleware(answer)({"type": "http"}, caller(leaves), ignore)
        return is_done

    assert asyncio.run(run())


def test_a_body_that_the_application_does_not_read_is_not_received() -> None:
    async def run() -> int:
        num_taken, may_answer = 0, asyncio.Event()

        async def endless() -> Message:
            nonlocal num_taken
            num_taken += 1
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b"x", "more_body": True}

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            await may_answer.wait()

        asyncio.get_running_loop().call_later(0.1, may_answer.set)
        await DisconnectMiddleware(refuse)({"type": "http"}, endless, no_answer)
        return num_taken

    assert asyncio.run(run()) < 20


def test_an_error_while_the_client_waits_is_raised() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        asyncio.run(DisconnectMiddleware(fail)({"type": "http"}, caller(), no_answer))


@pytest.mark.parametrize("num_cancels", [1, 2])
def test_an_application_that_does_not_receive_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, num_cancels: int
) -> None:
    monkeypatch.setattr("specserve.serve.middleware._GONE_S", 0.01)

    async def run() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def deaf(scope: Scope, receive: Receive, send: Send) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        call = asyncio.create_task(
            DisconnectMiddleware(deaf)({"type": "http"}, caller(), no_answer)
        )
        await asyncio.wait_for(began.wait(), 5)
        for _ in range(num_cancels):
            call.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(ended.wait(), 5)

    asyncio.run(run())


@pytest.mark.parametrize("handler", [None, answer_deep_nesting])
def test_a_body_that_is_nested_too_deeply_is_a_client_error(handler: Any) -> None:
    async def read(request: Request) -> Response:
        return JSONResponse(await request.json())

    app = Starlette(routes=[Route("/", read, methods=["POST"])])
    if handler is not None:
        app.add_exception_handler(RecursionError, handler)
    client = TestClient(app, raise_server_exceptions=False)
    answer = client.post("/", content=b"[" * 100_000)
    assert answer.status_code == (500 if handler is None else 400)
    if handler is not None:
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_added_handlers_keep_the_counts_of_requests() -> None:
    registry = CollectorRegistry()
    app = FastAPI()
    Instrumentator(registry=registry).instrument(app)
    app.middleware_stack = app.build_middleware_stack()  # as in vLLM's applications
    add_exception_handlers(app, {HTTPException: answer_http_error})
    answer = TestClient(app).get("/nowhere")
    assert answer.json()["error"]["type"] == "NotFoundError"
    labels = {"method": "GET", "status": "4xx", "handler": "none"}
    assert registry.get_sample_value("http_requests_total", labels) == 1


def test_a_middleware_without_the_next_one_is_named() -> None:
    class Opaque:
        def __init__(self, app: ASGIApp) -> None:
            self._next = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await self._next(scope, receive, send)

    app = FastAPI()
    app.add_middleware(Opaque)
    app.middleware_stack = app.build_middleware_stack()
    with pytest.raises(EngineError, match=r"engine\.vllm\.middleware: Opaque has no attribute"):
        add_exception_handlers(app, {HTTPException: answer_http_error})


async def accept(request: Request) -> Response:
    return Response()


def scaling_answer(app: Starlette) -> Any:
    return TestClient(app).post("/scale_elastic_ep", json={"new_data_parallel_size": 2})


def test_a_request_to_scale_engines_is_refused() -> None:
    app = Starlette(routes=[Route("/scale_elastic_ep", accept, methods=["POST"])])
    assert scaling_answer(app).status_code == 200
    refuse_scaling(app)
    answer = scaling_answer(app)
    assert answer.status_code == 501
    assert "placement.num_replicas" in answer.json()["error"]["message"]


def test_a_closed_scaling_route_stays_closed() -> None:
    app = Starlette(routes=[Route("/v1/models", accept)])
    refuse_scaling(app)
    assert scaling_answer(app).status_code == 404


def test_answers_beside_the_application_have_its_cors_headers() -> None:
    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=["https://ui.example"])
    client = TestClient(with_cors_of(app, Response(status_code=400)))
    allowed = "Access-Control-Allow-Origin"
    answer = client.post("/", headers={"Origin": "https://ui.example"})
    assert (answer.status_code, answer.headers[allowed]) == (400, "https://ui.example")
    assert allowed not in client.post("/", headers={"Origin": "https://other.example"}).headers
    plain = TestClient(with_cors_of(FastAPI(), Response(status_code=400)))
    assert allowed not in plain.post("/", headers={"Origin": "https://ui.example"}).headers
