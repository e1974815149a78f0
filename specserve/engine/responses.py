"""Reports errors within streams of the Responses API, in OpenAI's format."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

from openai.types.responses import ResponseErrorEvent
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

logger = logging.getLogger(__name__)


def end_with_errors(handler: Any) -> None:
    """Makes a failing stream end with the event ``error``.

    vLLM closes the connection within the stream, even if the request is wrong. For example, it
    checks token ids only after the first events. A stream from the background would wait for ever.

    Args:
        handler: vLLM's ``OpenAIServingResponses``.
    """
    stream = handler.responses_stream_generator
    from_background = handler.responses_background_stream_generator

    async def ended_with_errors(
        request: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        number = 0
        try:
            async for event in stream(request, *args, **kwargs):
                number += 1
                yield event
        except Exception as error:
            found = create_error_response(error).error
            if found.code >= 500:  # else the client's request is wrong
                logger.exception("A response was not streamed to its end")
            stored = handler.response_store.get(request.request_id)
            if stored is not None and stored.status in ("queued", "in_progress"):
                stored.status = "failed"
            yield ResponseErrorEvent(
                type="error",
                code=found.type,
                message=found.message,
                param=found.param,
                sequence_number=number,
            )

    async def ended_after_errors(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async for event in from_background(*args, **kwargs):
            yield event
            if getattr(event, "type", "") == "error":
                return

    def fail(error: Exception) -> NoReturn:
        raise error

    # vLLM's cannot be read as an event of this API, which would look like a client's error.
    handler._convert_generation_error_to_streaming_response = fail
    handler.responses_stream_generator = ended_with_errors
    handler.responses_background_stream_generator = ended_after_errors
