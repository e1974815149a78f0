"""What stands between Serve and vLLM's HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from specserve.serve.shared import AS_OF, CACHEABLE, Shared

_GONE_S = 1.0
"""The application's time to end a call whose client is gone, before the call is cancelled."""
_MOST_UNREAD = 16
"""Messages of a call that its application has not taken: pieces of a body that may be refused."""
_DISCONNECT: Message = {"type": "http.disconnect"}
_RENDER_S = 10.0
"""How long rendering the metrics may take."""
_BUSY = (503, 429)


class RetryAfterMiddleware:
    """Adds ``Retry-After`` to each 503 and 429 without it: clients know when to come back."""

    def __init__(self, app: ASGIApp, retry_after_s: int) -> None:
        self._app = app
        self._retry_after = str(retry_after_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in _BUSY:
                headers = MutableHeaders(scope=message)
                headers.setdefault("retry-after", self._retry_after)
            await send(message)

        await self._app(scope, receive, send_with_header)


class DisconnectMiddleware:
    """Ends a request whose client is gone, whichever way Serve lets it be known.

    Serve sends ``http.disconnect`` and cancels the call, in either order. vLLM's handlers listen
    for the message; when the cancellation overtakes it, they leave their request running to its
    end. So the application gets the message first, and the cancellation later. What it sends
    meanwhile is dropped: an answer whose sending failed would leave its generator, and with it
    vLLM's request, to the garbage collector.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_whole = is_gone = False
        messages: asyncio.Queue[Message] = asyncio.Queue(_MOST_UNREAD)

        async def receive_next() -> Message:
            return _DISCONNECT if is_gone and messages.empty() else await messages.get()

        async def send_if_there(message: Message) -> None:
            nonlocal is_whole
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")
            if not is_gone:
                await send(message)

        async def listen() -> None:
            with suppress(Exception):  # a connection that cannot be read is gone, too
                while (message := await receive())["type"] != "http.disconnect":
                    await messages.put(message)
            if is_whole:  # which ends the connection as well
                await asyncio.wait([call])

        call = asyncio.ensure_future(self._app(scope, receive_next, send_if_there))
        listener = asyncio.ensure_future(listen())
        try:
            await asyncio.wait([call, listener], return_when=asyncio.FIRST_COMPLETED)
        finally:
            listener.cancel()
            if not call.done():
                is_gone = True
                if messages.empty():
                    messages.put_nowait(_DISCONNECT)  # for who waits
                # In a task of its own: the cancellation may come while it waits.
                await asyncio.shield(asyncio.ensure_future(_end(call)))
        if not is_gone:
            call.result()


async def _end(call: asyncio.Future[None]) -> None:
    """Has a call end whose client is gone, by itself or not; what it ends with is of no matter."""
    await asyncio.wait([call], timeout=_GONE_S)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


def add_exception_handlers(
    app: FastAPI, handlers: Mapping[type[Exception], ExceptionHandler]
) -> None:
    """Adds handlers to an application whose middleware stack is built already, as vLLM's is.

    The stack is not built anew: vLLM's metrics of HTTP requests belong to the first one alone.
    """
    layer: Any = app.middleware_stack
    while not isinstance(layer, ExceptionMiddleware):
        layer = layer.app
    for error, handler in handlers.items():
        layer.add_exception_handler(error, handler)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Tells unknown paths and wrong methods in OpenAI's form; vLLM does so for its own errors.

    A handler of Starlette's ``HTTPException``.
    """
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}: {error.detail}"
    return openai_error(what, error.status_code, headers=error.headers)


async def answer_deep_nesting(request: Request, error: Exception) -> Response:
    """Answers 400 to a body that is nested too deeply to be read; vLLM would answer 500.

    A handler of ``RecursionError``.
    """
    return openai_error(f"The body cannot be read: {error}", 400)


def serve_fresh_metrics(
    app: Starlette, refresh: Callable[[], Awaitable[float]], registry: CollectorRegistry
) -> None:
    """Has ``GET /metrics`` answer after a refresh, in the place of vLLM's routes.

    The text is long: it is rendered once for each refresh, and not for each who asks. vLLM renders
    it for all methods, and for all paths that begin so.

    Args:
        app: vLLM's application.
        refresh: brings the speculation metrics up to date; tells when that was, in Unix time.
        registry: all metrics, vLLM's and ours.
    """

    encode, content_type = choose_encoder("")

    async def render(_: float) -> bytes:
        return encode(registry)

    texts = Shared(render, _RENDER_S)

    async def answer(request: Request) -> Response:
        refreshed_at = await refresh()
        headers = {"content-type": content_type, AS_OF: f"{refreshed_at:.6f}", **CACHEABLE}
        return Response(await texts.get(refreshed_at), headers=headers)

    _replace_routes(app, "/metrics", answer, "GET")


def refuse_scaling(app: Starlette) -> None:
    """Has vLLM's route that changes the number of engines answer 501, where that route is open."""
    _replace_routes(app, "/scale_elastic_ep", _answer_not_scaled, "POST")


def _replace_routes(
    app: Starlette, path: str, answer: Callable[[Request], Awaitable[Response]], method: str
) -> None:
    for index, route in enumerate(app.router.routes):
        if getattr(route, "path", "") == path:
            app.router.routes[index] = Route(path, answer, methods=[method])


async def _answer_not_scaled(request: Request) -> Response:
    message = "Engines are not scaled by request: placement.num_replicas says how many there are"
    return openai_error(message, 501)


def openai_error(
    message: str,
    code: int,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """OpenAI's form of an error, whose type is the name of the HTTP status ``code``."""
    kind = HTTPStatus(code).phrase.title().replace(" ", "") + "Error"
    content = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": content}, status_code=code, headers=headers)
