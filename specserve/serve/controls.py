"""Checks and notes what a request wishes of speculation, before vLLM reads the request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.core.errors import GenerationError, RequestError
from specserve.engine.prediction import CURRENT_PREDICTION, Prediction, Predictor
from specserve.engine.tenants import CURRENT_CONTROLS
from specserve.serve.generation.answers import error_response
from specserve.serve.generation.routes import is_generation
from specserve.serve.memory import is_memory
from specserve.serve.middleware import openai_error
from specserve.serve.prediction import (
    CountedAnswer,
    argument_texts,
    openai_texts,
    read_prediction,
)
from specserve.serve.response_format import for_vllm
from specserve.sources.controls import (
    BEAM_KEY,
    PREDICTION_KEY,
    own_fields,
    parse_controls,
    refuse_server_keys,
    samples_beams,
)

_KEYS = (b'"vllm_xargs"', b'"extra_args"', b'"prediction"', b'"use_beam_search"', b"\\u00")
"""A body without any of them holds nothing of ours. JSON may write a key's letters as escapes."""
_UTF_8 = ("utf-8", "utf-8-sig")
_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")


class ControlsMiddleware:
    """Refuses a request whose speculation controls or prediction are not allowed, and notes the
    others'. Puts response formats into vLLM's words.

    vLLM hands ``vllm_xargs`` to the worker unread, where it would be too late for an error; some of
    its handlers leave them out. Bodies without that key or a response format of others, nearly
    all, are passed on without being parsed.

    Args:
        app: the application behind.
        kinds: kinds of the configured sources; None: no controls are allowed.
        predictor: how to read predictions; None: none are allowed.
    """

    def __init__(
        self, app: ASGIApp, kinds: Sequence[str] | None, predictor: Predictor | None = None
    ) -> None:
        self._app = app
        self._kinds = kinds
        self._predictor = predictor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http" or scope["method"] != "POST" or is_memory(scope):
            await self._app(scope, receive, send)
            return
        sent, messages = await _read(receive)
        controls: dict[str, object] = {}
        try:
            body = sent if is_generation(scope) else for_vllm(sent)
            if body is not sent:
                messages = [{"type": "http.request", "body": body}]
                scope = {**scope, "headers": _with_length(scope["headers"], len(body))}
            prediction = await self._read(scope, body, messages, controls)
        except RequestError as error:
            await _refusal(scope, error)(scope, receive, send)
            return
        if prediction is not None:
            controls[PREDICTION_KEY] = prediction.token_ids.tobytes()
            send = CountedAnswer(send, prediction).send
        tokens = CURRENT_CONTROLS.set(controls), CURRENT_PREDICTION.set(prediction)
        try:
            await self._app(scope, _replay(messages, receive), send)
        finally:
            CURRENT_CONTROLS.reset(tokens[0])
            CURRENT_PREDICTION.reset(tokens[1])

    async def _read(
        self, scope: Scope, body: bytes, messages: list[Message], controls: dict[str, object]
    ) -> Prediction | None:
        """Checks a request, and adds to ``controls`` what it wishes; returns what it predicts."""
        texts: dict[str, str] = {}
        request: dict[str, Any] = {}
        async for field, arguments in _arguments(scope, body, messages):
            if is_generation(scope) and field != "vllm_xargs":
                if not field:  # that API ignores what it does not know
                    request = {"parameters": arguments.get("parameters")}
                continue
            if not field:
                request = arguments
                texts |= openai_texts(request)
                continue
            self._check(field, arguments)
            controls |= own_fields(arguments)
            texts |= argument_texts(field, arguments)
            if samples_beams(arguments) and not request.get("use_beam_search"):
                raise RequestError(f"{field}.{BEAM_KEY}", 1, "0 without use_beam_search")
        if request.get("use_beam_search") and request.get("stream"):
            raise RequestError("stream", True, "false beside use_beam_search")
        return await read_prediction(texts, request, self._predictor)

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
        message = f"Input validation error: {error}"
        return error_response(GenerationError("validation", message))
    return openai_error(str(error), "BadRequestError", error.field, 400)


async def _arguments(
    scope: Scope, body: bytes, messages: list[Message]
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """The arguments that vLLM would hand to the worker, each with its field's name, and the request
    itself without a name.

    A body that cannot be read has none: vLLM answers it in its own words.
    """
    content_type = Request(scope).headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() in _FORMS:  # as of the speech routes
        texts = [text async for text in _form_fields(scope, messages)]
        found = [("vllm_xargs", _parsed(text)) for text in texts]
    elif json.detect_encoding(body) not in _UTF_8 or any(key in body for key in _KEYS):
        found = list(_in_request(_parsed(body)))
    else:
        return
    for field, arguments in found:
        if isinstance(arguments, dict):
            yield field, arguments


def _in_request(request: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(request, dict):
        yield "", request
        yield "vllm_xargs", request.get("vllm_xargs")
        sampling = request.get("sampling_params")  # of the route that takes tokens
        if isinstance(sampling, dict):
            yield "sampling_params.extra_args", sampling.get("extra_args")


def _parsed(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


async def _form_fields(scope: Scope, messages: list[Message]) -> AsyncIterator[str]:
    async def ended() -> Message:
        return {"type": "http.disconnect"}

    try:
        async with Request(scope, _replay(messages, ended)).form() as form:
            for value in form.getlist("vllm_xargs"):
                if isinstance(value, str):
                    yield value
    except (MultiPartException, HTTPException, ValueError, LookupError):
        return


def _with_length(headers: Iterable[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    others = [(name, value) for name, value in headers if name != b"content-length"]
    return [*others, (b"content-length", str(length).encode())]


async def _read(receive: Receive) -> tuple[bytes, list[Message]]:
    messages: list[Message] = []
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body", False):
            return b"".join(m.get("body", b"") for m in messages), messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    waiting = iter(messages)

    async def replay() -> Message:
        message = next(waiting, None)
        return message if message is not None else await receive()

    return replay
