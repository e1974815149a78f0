"""ASGI middleware and routes between Serve and vLLM's HTTP application."""

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
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from specserve.core.errors import EngineError
from specserve.serve.shared import AS_OF, CACHEABLE, Shared

_GONE_S = 1.0
"""Seconds that a call has to end after its client disconnected. Then it is cancelled."""
_MAX_UNREAD_MESSAGES = 16
"""Most pieces of a body that are buffered while the application does not read them."""
_DISCONNECT: Message = {"type": "http.disconnect"}
_RENDER_S = 10.0
"""Time limit for rendering the metrics, in seconds."""
_BUSY = (503, 429)
_ADAPTER_PATHS = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/adapters",
    "/adapters/{adapter_name}",
)


def with_cors_of(app: FastAPI, wrapped: ASGIApp) -> ASGIApp:
    """Adds vLLM's CORS headers also to answers that do not come from its application ``app``.

    Without them, a page of another origin cannot read our errors.
    """
    for middleware, args, options in app.user_middleware:
        if middleware == CORSMiddleware:
            return CORSMiddleware(wrapped, *args, **options)
    return wrapped


class RetryAfterMiddleware:
    """Adds ``Retry-After`` to each 503 and 429 that lacks it."""

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
    """Ends a request whose client has disconnected.

    On a disconnect Serve sends ``http.disconnect`` and cancels the call, in either order. vLLM's
    handlers listen for the message. If the cancellation comes first, vLLM's request runs to its
    end. So this class delivers the message first, and cancels later. It drops what the application
    still sends: a failed send would leave vLLM's request to the garbage collector.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_whole = is_gone = False
        messages: asyncio.Queue[Message] = asyncio.Queue(_MAX_UNREAD_MESSAGES)

        async def receive_next() -> Message:
            return _DISCONNECT if is_gone and messages.empty() else await messages.get()

        async def send_if_there(message: Message) -> None:
            nonlocal is_whole
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")
            if not is_gone:
                await send(message)

        async def listen() -> None:
            with suppress(Exception):  # a connection that cannot be read counts as closed
                while (message := await receive())["type"] != "http.disconnect":
                    await messages.put(message)
            if is_whole:  # a complete answer also ends with http.disconnect
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
                    messages.put_nowait(_DISCONNECT)  # wakes an application that is receiving
                # A shielded task, because this call may be cancelled while it waits.
                await asyncio.shield(asyncio.ensure_future(_end(call)))
        if not is_gone:
            call.result()


async def _end(call: asyncio.Future[None]) -> None:
    """Waits ``_GONE_S`` for a call to end, then cancels it; ignores its result and its error."""
    await asyncio.wait([call], timeout=_GONE_S)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


def add_exception_handlers(
    app: FastAPI, handlers: Mapping[type[Exception], ExceptionHandler]
) -> None:
    """Adds handlers to an application whose middleware stack is already built, such as vLLM's.

    Raises:
        EngineError: a configured middleware does not keep the next one as ``app``.
    """
    layer = _innermost(app)
    for error, handler in handlers.items():
        layer.add_exception_handler(error, handler)


def wrap_routes(app: FastAPI, wrap: Callable[[ASGIApp], ASGIApp]) -> None:
    """Wraps an application's routes inside its middleware, whose stack is already built.

    Configured middleware then sees a request first, as in ``vllm serve``.

    Raises:
        EngineError: a configured middleware does not keep the next one as ``app``.
    """
    layer = _innermost(app)
    layer.app = wrap(layer.app)


def _innermost(app: FastAPI) -> Any:
    """Finds the innermost middleware of a stack.

    The stack is not rebuilt: vLLM's metrics of HTTP requests work only in the first one.
    """
    layer: Any = app.middleware_stack
    while not isinstance(layer, ExceptionMiddleware):
        if not hasattr(layer, "app"):
            name = type(layer).__name__
            raise EngineError(f"engine.vllm.middleware: {name} has no attribute 'app'")
        layer = layer.app
    return layer


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Answers Starlette's ``HTTPException``, such as an unknown path, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}: {error.detail}"
    return openai_error(what, error.status_code, headers=error.headers)


async def answer_deep_nesting(request: Request, error: Exception) -> Response:
    """Answers 400 on ``RecursionError``: a body is nested too deeply. vLLM would answer 500."""
    return openai_error(f"The body cannot be read: {error}", 400)


def serve_fresh_metrics(
    app: Starlette, refresh: Callable[[], Awaitable[float]], registry: CollectorRegistry
) -> None:
    """Replaces vLLM's route ``/metrics`` by one that refreshes the speculation metrics first.

    The text is long, so it is rendered once for each refresh, for all readers together. A reader
    may name the series that it wants by ``name[]``.

    Args:
        app: vLLM's application.
        refresh: updates the speculation metrics; returns the Unix time of their counts.
        registry: all metrics, vLLM's and ours.
    """

    encode, content_type = choose_encoder("")

    async def render(_: float) -> bytes:
        return encode(registry)

    texts = Shared(render, _RENDER_S)

    async def answer(request: Request) -> Response:
        refreshed_at = await refresh()
        headers = {"content-type": content_type, AS_OF: f"{refreshed_at:.6f}", **CACHEABLE}
        if names := request.query_params.getlist("name[]"):
            return Response(encode(registry.restricted_registry(names)), headers=headers)
        return Response(await texts.get(refreshed_at), headers=headers)

    _replace_routes(app, "/metrics", answer)


def refuse_scaling(app: Starlette) -> None:
    """Makes vLLM's route ``/scale_elastic_ep``, where it exists, answer 501."""
    message = "Engines are not scaled by request: placement.num_replicas says how many there are"
    _refuse(app, "/scale_elastic_ep", message)


def refuse_adapters(app: Starlette) -> None:
    """Makes vLLM's routes that load or unload an adapter, where they exist, answer 501."""
    for path in _ADAPTER_PATHS:
        _refuse(app, path, "One of several replicas would do it: use one replica or a resolver")


def _refuse(app: Starlette, path: str, message: str) -> None:
    async def answer(request: Request) -> Response:
        return openai_error(message, 501)

    _replace_routes(app, path, answer)


def _replace_routes(
    app: Starlette, path: str, answer: Callable[[Request], Awaitable[Response]]
) -> None:
    for index, route in enumerate(app.router.routes):
        if getattr(route, "path", "") == path:
            app.router.routes[index] = Route(path, answer, methods=getattr(route, "methods", None))


def openai_error(
    message: str,
    code: int,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Returns an error in OpenAI's form. Its type is the name of the HTTP status ``code``."""
    kind = HTTPStatus(code).phrase.title().replace(" ", "") + "Error"
    content = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": content}, status_code=code, headers=headers)
