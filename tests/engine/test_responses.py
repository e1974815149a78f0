from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.responses import api_router, serving
from vllm.exceptions import GenerationError, VLLMValidationError

from specserve.engine.responses import end_with_errors


async def events(request: Any, error: Exception | None) -> AsyncGenerator[str, None]:
    yield "created"
    yield "in progress"
    if error is not None:
        raise error


class Handler:
    """The parts of vLLM's handler that are wrapped, with a stored response."""

    _run_background_request_stream = serving.OpenAIServingResponses._run_background_request_stream
    responses_background_stream_generator = (
        serving.OpenAIServingResponses.responses_background_stream_generator
    )

    def __init__(self) -> None:
        self.responses_stream_generator: Any = events
        self.stored = SimpleNamespace(status="queued")
        self.response_store = {"resp-1": self.stored}
        self.event_store: dict[str, Any] = {}
        end_with_errors(self)


REQUEST = SimpleNamespace(request_id="resp-1")


def streamed(error: Exception | None) -> list[Any]:
    async def collect() -> list[Any]:
        return [event async for event in Handler().responses_stream_generator(REQUEST, error)]

    return asyncio.run(collect())


@pytest.mark.parametrize("status", ["queued", "completed", "cancelled"])
def test_a_failed_stream_from_the_background_ends_and_is_marked_as_failed(status: str) -> None:
    handler = Handler()
    handler.stored.status = status

    async def collect() -> list[Any]:
        await handler._run_background_request_stream(REQUEST, ValueError("wrong"))
        stream = handler.responses_background_stream_generator("resp-1")
        return [event async for event in stream]

    *others, last = asyncio.run(asyncio.wait_for(collect(), 10))
    assert others == ["created", "in progress"]
    assert last.type == "error"
    assert handler.stored.status == ("failed" if status == "queued" else status)


def test_a_stream_without_an_error_is_not_changed() -> None:
    assert streamed(None) == ["created", "in progress"]


def test_a_client_error_is_an_event_of_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    wrong = VLLMValidationError("no such token", parameter="stop_token_ids", value=[-1])
    *others, last = streamed(wrong)
    assert others == ["created", "in progress"]
    assert (last.type, last.code, last.param) == ("error", "BadRequestError", "stop_token_ids")
    assert "no such token" in last.message
    assert last.sequence_number == 2
    assert not caplog.records


def test_a_server_error_is_an_event_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    last = streamed(RuntimeError("out of memory"))[-1]
    assert (last.type, last.code) == ("error", "InternalServerError")
    assert "out of memory" in caplog.text


def test_vllm_streams_responses_by_this_method_without_error_events() -> None:
    made = inspect.getsource(serving.OpenAIServingResponses._create_responses)
    assert "return self.responses_stream_generator(" in made
    assert "except" not in inspect.getsource(api_router._convert_stream_to_sse_events)


def test_a_failed_generation_is_a_server_error_of_the_stream() -> None:
    generator = inspect.getsource(serving.OpenAIServingResponses.responses_stream_generator)
    assert "self._convert_generation_error_to_streaming_response(e)" in generator

    async def events_of(request: Any, error: Any) -> Any:
        yield "created"
        handler._convert_generation_error_to_streaming_response(error)

    handler: Any = Handler()
    handler.responses_stream_generator = events_of
    end_with_errors(handler)

    async def collect() -> list[Any]:
        error = GenerationError("the grammar refuses a token")
        return [each async for each in handler.responses_stream_generator(REQUEST, error)]

    assert asyncio.run(collect())[-1].code == "InternalServerError"
