"""Streamed answers of the Responses API: what fails within one is told, as OpenAI tells it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

from openai.types.responses import ResponseErrorEvent
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

logger = logging.getLogger(__name__)


def end_with_errors(handler: Any) -> None:
    """Has a stream that fails end with the event ``error``.

    vLLM closes the connection within the stream, also where the request itself is wrong: it checks
    token ids, for instance, after the first events.

    Args:
        handler: vLLM's ``OpenAIServingResponses``; None: the model does not generate.
    """
    if handler is None:
        return
    stream = handler.responses_stream_generator

    async def told(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        number = 0
        try:
            async for event in stream(*args, **kwargs):
                number += 1
                yield event
        except Exception as error:
            found = create_error_response(error).error
            if found.code >= 500:  # else it is the client's mistake
                logger.exception("A response was not streamed to its end")
            yield ResponseErrorEvent(
                type="error",
                code=found.type,
                message=found.message,
                param=found.param,
                sequence_number=number,
            )

    handler.responses_stream_generator = told
