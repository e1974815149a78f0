"""Routes of the generation API: ``/generate``, ``/generate_stream``, ``/`` and ``/info``."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match
from starlette.types import Scope

from specserve import __version__
from specserve.core.config import AppConfig
from specserve.core.errors import GenerationError
from specserve.engine.text_request import MAX_BEST_OF, MAX_STOP_SEQUENCES, GenerateBody
from specserve.serve.generation.answers import error_response, events, whole_response
from specserve.serve.generation.schema import checked, refusal
from specserve.serve.paths import path_of

if TYPE_CHECKING:
    from specserve.engine.text_generator import TextGenerator  # vLLM takes seconds to import

_PATHS = ("", "/generate", "/generate_stream")


class _Route(APIRoute):
    """A route whose errors have Text Generation Inference's form."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Overrides Starlette's method: the application's bare prefix counts as ``/``."""
        if scope["path"] == scope.get("root_path", ""):
            scope = {**scope, "path": scope["path"] + "/"}
        return super().matches(scope)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Overrides FastAPI's method: converts the errors."""
        handle = super().get_route_handler()

        async def handle_in_form(request: Request) -> Response:
            try:
                return await handle(request)
            except GenerationError as error:
                return error_response(error)
            except RequestValidationError as error:
                return error_response(refusal(error.errors()))
            except HTTPException as error:  # the body is not text, or is nested too deeply
                return error_response(GenerationError.invalid(str(error.detail)))

        return handle_in_form


def generation_router(config: AppConfig, engine: TextGenerator) -> APIRouter:
    """Returns the routes of one replica."""
    router = APIRouter(route_class=_Route)

    @router.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Continues a text; streams the tokens if the body has ``stream``."""
        return await _answer(engine, body, request, streams=bool(body.stream))

    @router.post("/generate_stream")
    async def generate_stream(body: GenerateBody, request: Request) -> Response:
        """Continues a text, and streams the tokens."""
        return await _answer(engine, body, request, streams=True)

    @router.post("/")
    async def compat_generate(body: GenerateBody, request: Request) -> Response:
        """Answers like ``/generate``, with the prompt before the text, and in a list of one."""
        streams = bool(body.stream)
        return await _answer(engine, body, request, streams=streams, is_root=True)

    @router.get("/info")
    async def info() -> dict[str, Any]:
        """The model and the limits of requests."""
        return {
            "model_id": config.model.name,
            "model_sha": config.model.revision or None,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": engine.max_concurrent_requests,
            "max_best_of": MAX_BEST_OF,
            "max_stop_sequences": MAX_STOP_SEQUENCES,
            "max_input_tokens": engine.max_total_tokens - 1,
            "max_total_tokens": engine.max_total_tokens,
            "validation_workers": engine.num_tokenizers,
            "max_client_batch_size": 1,
            "router": "specserve",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }

    return router


async def _answer(
    engine: TextGenerator,
    body: GenerateBody,
    request: Request,
    *,
    streams: bool,
    is_root: bool = False,
) -> Response:
    started = time.perf_counter()
    asked = checked(body, engine.max_total_tokens, streams=streams, full_text=is_root)
    outputs = engine.generate(asked, request)
    # Errors of the request come before the first output, so the answer can still have their status.
    # If the client disconnects before it, :class:`DisconnectMiddleware` cancels this call.
    first = await anext(outputs, None)
    if first is None:
        raise GenerationError("incomplete_generation", "Incomplete generation")
    if streams:
        return StreamingResponse(
            events(asked, first, outputs),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},  # stops proxies such as nginx from buffering
        )
    async for _ in outputs:
        raise AssertionError("more than one output of a request that is not streamed")
    return whole_response(asked, first, time.perf_counter() - started, listed=is_root)


def is_generation(scope: Scope) -> bool:
    """Whether a call goes to one of this API's routes that continue a text."""
    return scope["type"] == "http" and scope["method"] == "POST" and path_of(scope) in _PATHS
