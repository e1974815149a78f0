"""Checks a request's speculation controls and its prediction, before vLLM reads the request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request, empty_receive
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.core.errors import GenerationError, RequestError
from specserve.engine.prediction import CURRENT_PREDICTION, Prediction, Predictor
from specserve.engine.tenants import CURRENT_CALL, CURRENT_CONTROLS, RESERVED
from specserve.engine.text_request import Grammar
from specserve.serve.bodies import Bodies
from specserve.serve.generation.answers import error_response
from specserve.serve.generation.routes import is_generation
from specserve.serve.memory import is_memory
from specserve.serve.middleware import openai_error
from specserve.serve.prediction import argument_texts, openai_texts, read_prediction
from specserve.sources.controls import (
    BEAM_KEY,
    PREDICTION_KEY,
    own_fields,
    parse_controls,
    refuse_server_keys,
    samples_beams,
)

_KEYS = (
    *(b'"vllm_xargs"', b'"extra_args"', b'"prediction"', b'"use_beam_search"'),
    *(b'"response_format"', b"\\u00", b"\0"),
)
"""Only a body that holds one of these is parsed here; most bodies hold none. The last two find keys
that JSON writes with escaped letters, and bodies in UTF-16 or UTF-32."""

_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
_FORMATS = 'json_schema as OpenAI has it, or "type" json_object or regex with a "value"'


class ControlsMiddleware:
    """Refuses controls and predictions that are not allowed, and hands the others to the engine.

    vLLM passes ``vllm_xargs`` to the worker unchecked, where an error comes too late. Some of
    vLLM's handlers drop them. TGI's response formats are rewritten as ``structured_outputs``.

    Args:
        app: the wrapped application.
        kinds: kinds of the configured sources; None: controls are refused.
        predictor: tokenizes predictions; None: predictions are refused.
    """

    def __init__(
        self, app: ASGIApp, kinds: Sequence[str] | None, predictor: Predictor | None = None
    ) -> None:
        self._app = app
        self._kinds = kinds
        self._predictor = predictor
        self._bodies = Bodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http" or scope["method"] != "POST" or is_memory(scope):
            await self._app(scope, receive, send)
            return
        async with AsyncExitStack() as open_bodies:
            try:
                body = await open_bodies.enter_async_context(self._bodies.read(scope, receive))
            except ClientDisconnect:  # vLLM's metrics would count a call without an answer as 500
                await openai_error("The client disconnected", 400)(scope, receive, send)
            except HTTPException as error:
                await openai_error(error.detail, error.status_code)(scope, receive, send)
            else:
                await self._answer(scope, body, receive, send)

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        given = await _request(scope, body)
        try:
            request = _with_structured_outputs(given)
            controls, prediction = await self._read(request)
        except RequestError as error:
            await _refusal(scope, error)(scope, receive, send)
            return
        if request is not given:
            body = json.dumps(request).encode()
            headers = MutableHeaders(raw=list(scope["headers"]))
            headers["content-length"] = str(len(body))
            scope = {**scope, "headers": headers.raw}
        del given, request  # frees them while the answer is computed
        call = object()
        tokens = CURRENT_CONTROLS.set(controls), CURRENT_PREDICTION.set(prediction)
        token = CURRENT_CALL.set(call)
        RESERVED[call] = 0
        try:
            await self._app(scope, _with_body(body, receive), send)
        finally:
            CURRENT_CONTROLS.reset(tokens[0])
            CURRENT_PREDICTION.reset(tokens[1])
            CURRENT_CALL.reset(token)
            del RESERVED[call]

    async def _read(
        self, request: Mapping[str, Any]
    ) -> tuple[dict[str, object], Prediction | None]:
        """Returns the controls for the engine, and the prediction; None: there is none.

        Raises:
            RequestError: a field has a value that is not allowed.
        """
        controls: dict[str, object] = {}
        texts = openai_texts(request)
        for field, arguments in _arguments(request):
            self._check(field, arguments)
            controls |= own_fields(arguments)
            texts |= argument_texts(field, arguments)
            if samples_beams(arguments) and not request.get("use_beam_search"):
                raise RequestError(f"{field}.{BEAM_KEY}", 1, "0 without use_beam_search")
        if request.get("use_beam_search") and request.get("stream"):
            raise RequestError("stream", True, "false beside use_beam_search")
        prediction = await read_prediction(texts, request, self._predictor)
        if prediction is not None:
            controls[PREDICTION_KEY] = prediction.token_ids.tobytes()
        return controls, prediction

    def _check(self, field: str, arguments: Mapping[str, Any]) -> None:
        try:
            refuse_server_keys(arguments)
            parse_controls(arguments, self._kinds)
        except RequestError as error:
            key = error.field.removeprefix("vllm_xargs")
            raise RequestError(field + key, error.value, error.allowed) from None


def _refusal(scope: Scope, error: RequestError) -> Response:
    """The error in the form of the API that was called."""
    if is_generation(scope):
        return error_response(GenerationError.invalid(str(error)))
    return openai_error(str(error), 400, error.field)


async def _request(scope: Scope, body: bytes) -> dict[str, Any]:
    """Returns the fields of a body that this module may need.

    Returns no fields for a body that cannot be read: vLLM answers it with its own error.
    """
    content_type = Headers(scope=scope).get("content-type", "")
    if content_type.partition(";")[0].strip().lower() in _FORMS:  # the speech routes
        return {"vllm_xargs": await _form_arguments(scope, body)}
    request = _parsed(body) if any(key in body for key in _KEYS) else {}
    if is_generation(scope):  # this API ignores unknown fields
        return {key: request.get(key) for key in ("parameters", "vllm_xargs")}
    return request


def _with_structured_outputs(request: dict[str, Any]) -> dict[str, Any]:
    """Rewrites a response format of Text Generation Inference (TGI) as ``structured_outputs``.

    Hugging Face's client sends TGI's formats to OpenAI's routes: ``{"type": "json_object",
    "value": SCHEMA}``. vLLM ignores or refuses them. Other requests are returned unchanged.

    Raises:
        RequestError: the value does not fit the type, or ``structured_outputs`` is given as well.
    """
    given = request.get("response_format")
    if not isinstance(given, dict) or given.get("value") is None or given.get("json_schema"):
        return request
    try:
        structured = Grammar.model_validate(given).constraint()
    except (ValidationError, GenerationError):
        raise RequestError("response_format", given, _FORMATS) from None
    if request.get("structured_outputs"):
        raise RequestError("response_format", given, "only without structured_outputs")
    others = {key: each for key, each in request.items() if key != "response_format"}
    return others | {"structured_outputs": structured}


def _arguments(request: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the arguments that vLLM passes to the worker, each with its field's name."""
    if isinstance(arguments := request.get("vllm_xargs"), dict):
        yield "vllm_xargs", arguments
    sampling = request.get("sampling_params")  # /inference/v1/generate
    if isinstance(sampling, dict) and isinstance(arguments := sampling.get("extra_args"), dict):
        yield "sampling_params.extra_args", arguments


def _parsed(text: bytes | str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


async def _form_arguments(scope: Scope, body: bytes) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    # Raised by forms that cannot be read.
    with suppress(MultiPartException, HTTPException, ValueError, LookupError):
        async with Request(scope, _with_body(body, empty_receive)).form() as form:
            for value in form.getlist("vllm_xargs"):
                if isinstance(value, str):
                    arguments |= _parsed(value)
    return arguments


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Returns a function that gives the body in one message, then the messages of ``receive``."""
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def receive_next() -> Message:
        return messages.pop() if messages else await receive()

    return receive_next
