from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientTimeout, web
from vllm import SamplingParams
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from specserve.bench import server
from specserve.bench.server import Server, find_server, request_options
from specserve.core.errors import ConfigError, SpecServeError
from specserve.engine.generation import Job, RunResult, Sampling

Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def serving(answer: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    app.router.add_get("/v1/models", answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def run(answer: Handler) -> RunResult:
    async def both() -> RunResult:
        async with serving(answer) as url:
            job = Job((1, 2), Sampling(max_tokens=4))
            asked = Server(url, "demo", 100)
            return await asyncio.to_thread(asked.run, [job], 1)

    return asyncio.run(both())


def chunk(*token_ids: int, **more: Any) -> bytes:
    choice = {"text": " t" * len(token_ids), "token_ids": token_ids, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice | more]}).encode() + b"\n\n"


def streaming(*chunks: bytes, pause_s: float = 0.0) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for each in chunks:
            await response.write(each)
            await asyncio.sleep(pause_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


def test_the_timeout_is_for_each_chunk_and_not_for_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[aiohttp.ClientTimeout] = []

    def note(**limits: float) -> aiohttp.ClientTimeout:
        made.append(ClientTimeout(**limits))
        return made[-1]

    monkeypatch.setattr(aiohttp, "ClientTimeout", note)
    chunks = [*(chunk(n) for n in range(4)), chunk(finish_reason="length")]
    (only,) = run(streaming(*chunks)).completions
    assert only.token_ids == (0, 1, 2, 3)
    assert (only.text, only.finish_reason) == (" t t t t", "length")
    (timeout,) = made
    assert (timeout.sock_read, timeout.total) == (server.TIMEOUT_S, None)


def test_a_stream_that_stalls_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TIMEOUT_S", 0.2)
    with pytest.raises(SpecServeError, match=r"^request 1 failed: "):
        run(streaming(chunk(1), pause_s=30.0))  # until the client leaves


@pytest.mark.parametrize("event", [b"{}", b'{"choices": [{}]}', b'{"choices": 5}', b"5"])
def test_an_event_of_another_form_is_an_error(event: bytes) -> None:
    with pytest.raises(SpecServeError, match=r"^request 1 failed: "):
        run(streaming(b"data: " + event + b"\n\n"))


def test_an_answer_has_the_counts_of_its_sources() -> None:
    counts = {"ngram": {"drafted_tokens": 6, "accepted_tokens": 4}}
    usage = {"choices": [], "metrics": {"speculative_decoding": {"sources": counts}}}
    metrics = b"data: " + json.dumps(usage).encode() + b"\n\n"
    (only,) = run(streaming(chunk(1), chunk(finish_reason="length"), metrics)).completions
    assert only.sources == counts
    (only,) = run(streaming(chunk(1))).completions
    assert only.sources == {}


def test_a_long_line_of_prompt_tokens_is_read() -> None:
    (only,) = run(streaming(chunk(7, prompt_token_ids=[100_000] * 100_000))).completions
    assert only.token_ids == (7,)


def test_a_servers_error_is_reported_before_and_within_a_stream() -> None:
    refusal = {"error": {"message": "too\nlong", "code": 400}}

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response(refusal, status=400)

    async def break_down(request: web.Request) -> web.Response:
        return web.Response(status=502, text="<html>")

    with pytest.raises(SpecServeError, match=r"^request 1 failed: too long$"):
        run(refuse)
    with pytest.raises(SpecServeError, match=r"^request 1 failed: HTTP 502$"):
        run(break_down)
    within = b"data: " + json.dumps(refusal).encode() + b"\n\n"
    with pytest.raises(SpecServeError, match=r"^request 1 failed: too long$"):
        run(streaming(chunk(1), within))


def test_a_server_without_token_ids_is_refused() -> None:
    with pytest.raises(SpecServeError, match=r"it has to be vLLM's application$"):
        run(streaming(chunk(finish_reason="stop")))


def test_a_checkpoints_sampling_defaults_are_overridden() -> None:
    options = request_options(Sampling(max_tokens=4, temperature=1.0))
    its_own = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    its_own |= {"min_p": 0.1, "top_k": 5, "top_p": 0.5, "temperature": 0.7}
    asked = CompletionRequest(prompt=[1], **options).to_sampling_params(4, its_own)
    neutral = SamplingParams(temperature=1.0)  # a greedy request ignores top_k, top_p and min_p
    for name in its_own:
        assert getattr(asked, name) == getattr(neutral, name), name


def test_each_request_is_sent_with_the_fields_of_the_run() -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> Any:
        bodies.append(await request.json())
        return await streaming(chunk(7, finish_reason="stop"))(request)

    async def both() -> None:
        async with serving(answer) as url:
            jobs = [Job((1, 2), Sampling(max_tokens=4))]
            asked = Server(url, "demo", 100)
            for fields in ({}, {"vllm_xargs": {"speculation": "off"}}):
                asked.fields = fields
                await asyncio.to_thread(asked.run, jobs, 1)

    asyncio.run(both())
    assert [body.get("vllm_xargs") for body in bodies] == [None, {"speculation": "off"}]
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies)


def refusal_of(answer: Handler) -> str:
    """The error for a server with this answer to ``/v1/models``."""

    async def ask() -> str:
        async with serving(answer) as url:
            with pytest.raises(SpecServeError) as refused:
                await asyncio.to_thread(find_server, url)
            return str(refused.value).replace(url, "URL")

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            503,
            "",
            "URL/v1/models answers HTTP 503: Service Unavailable; it is loading its model, or it is"
            " stopping",
        ),
        (
            401,
            '{"error": {"message": "no key"}}',
            "URL/v1/models answers HTTP 401: no key",
        ),
        (404, "", "URL/v1/models answers HTTP 404: Not Found"),
    ],
)
def test_a_servers_refusal_has_its_reason(status: int, body: str, expected: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    assert refusal_of(answer) == expected


def test_a_server_without_vllms_api_is_refused() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    assert refusal_of(answer).startswith("--url: 'URL' is not allowed; allowed: a server of vLLM's")


def test_a_server_that_does_not_answer_is_reported_as_such() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SpecServeError, match=f"^no server answers at {url}: "):
            find_server(url)


@pytest.mark.parametrize("url", ["localhost:8000", f"http://{'a' * 64}.example"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=f"^--url: '{url[:14]}.* is not allowed"):
        find_server(url)


def test_the_target_of_a_redirect_is_reported() -> None:
    async def answer(_: web.Request) -> web.Response:
        raise web.HTTPMovedPermanently("https://elsewhere/v1/models")

    expected = "URL/v1/models answers HTTP 301: Moved Permanently to https://elsewhere/v1/models"
    assert refusal_of(answer) == expected
