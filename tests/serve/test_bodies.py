"""Limits of request bodies, by the middleware that reads them."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from specserve.serve import bodies
from specserve.serve.controls import ControlsMiddleware

PATH = "/v1/completions"


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body's length."""
    body = await Request(scope, receive).body()
    await Response(str(len(body)))(scope, receive, send)


def test_a_body_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 1 << 20)
    client = TestClient(ControlsMiddleware(answer, []))
    assert client.post(PATH, content=b"x" * (1 << 20)).text == str(1 << 20)
    refused = client.post(PATH, content=b"x" * ((1 << 20) + 1))
    assert refused.status_code == 413
    assert refused.json()["error"]["message"] == "The body has more than 1 MiB"


def test_bodies_of_all_calls_are_limited_while_they_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_OPEN_BYTES", 100)
    held, free = asyncio.Event(), asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == PATH:
            held.set()
            await free.wait()
        await answer(scope, receive, send)

    async def run() -> list[int]:
        transport = httpx.ASGITransport(ControlsMiddleware(wait, []))
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            first = asyncio.create_task(client.post(PATH, content=b"x" * 60))
            await held.wait()
            found = [await client.post("/tokenize", content=b"x" * size) for size in (40, 41, 40)]
            free.set()
            found += [await first, await client.post("/tokenize", content=b"x" * 100)]
        return [each.status_code for each in found]

    assert asyncio.run(run()) == [200, 503, 200, 200, 200]


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
def test_a_call_that_fails_leaves_its_room_to_others(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_OPEN_BYTES", 100)
    opened = bodies.Bodies()

    async def run() -> None:
        for _ in range(3):
            with pytest.raises(error):
                async with opened.read(scope(), receive_one):
                    raise error

    async def receive_one() -> dict[str, object]:
        return {"type": "http.request", "body": b"x" * 60}

    def scope() -> Scope:
        return {"type": "http", "method": "POST", "headers": []}

    asyncio.run(run())
