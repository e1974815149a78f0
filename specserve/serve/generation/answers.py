"""Answers of the generation API, in the format of Text Generation Inference."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from specserve.core.errors import GenerationError, GenerationErrorKind
from specserve.engine.text_request import Asked, Continuation, Output

STATUSES: Mapping[GenerationErrorKind, int] = {
    "validation": 422,
    "generation": 424,
    "overloaded": 429,
    "incomplete_generation": 500,
}

_encode = msgspec.json.Encoder().encode


def error_response(error: GenerationError) -> Response:
    """Returns an error answer; its status follows from the error's kind."""
    content = _encode(_error(error))
    return Response(content, STATUSES[error.kind], media_type="application/json")


def _error(error: GenerationError) -> dict[str, str]:
    return {"error": str(error), "error_type": error.kind}


def whole_response(asked: Asked, output: Output, seconds: float, *, listed: bool) -> Response:
    """Returns an answer that is not streamed; ``listed``: as a list of one.

    The continuation with the highest mean log-probability is the answer's text.
    """
    (index, best), *others = sorted(
        enumerate(output.continuations), key=lambda each: each[1].mean_logprob, reverse=True
    )
    answer: dict[str, Any] = {"generated_text": asked.before + best.text}
    if asked.details:
        sequences = [
            {
                "generated_text": asked.before + other.text,
                **_ending(asked, other_index, other, other.num_tokens),
                **_tokens(output, other),
            }
            for other_index, other in others
        ]
        answer["details"] = {
            **_ending(asked, index, best, best.num_tokens),
            "prompt_tokens": output.num_prompt_tokens,
            **_tokens(output, best),
            **_if_any(best_of_sequences=sequences),
        }
    headers = {
        "x-prompt-tokens": str(output.num_prompt_tokens),
        "x-generated-tokens": str(best.num_tokens),
        "x-total-time": str(round(seconds * 1000)),
    }
    content = _encode([answer] if listed else answer)
    return Response(content, media_type="application/json", headers=headers)


async def events(
    asked: Asked, first: Output, outputs: AsyncGenerator[Output, None]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a streamed answer: one for each token, even if a step adds several.

    An error becomes the last event. Closes ``outputs``, from which ``first`` is already taken.
    """
    async with aclosing(outputs):
        try:
            stream = _Stream(asked)
            output: Output | None = first
            while output is not None:
                if chunk := stream.take(output):
                    yield chunk
                output = await anext(outputs, None)
            if not stream.is_whole:
                message = "Incomplete generation stream"
                raise GenerationError("incomplete_generation", message)
        except GenerationError as error:
            yield _as_event(_error(error))


class _Stream:
    """The state of one streamed text."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._num_tokens = 0
        self._text = asked.before
        self.is_whole = False

    def take(self, output: Output) -> bytes:
        """Returns the events of the output's new tokens; empty if it has none."""
        (new,) = output.continuations
        self._text += new.text
        chunks = []
        for number, token in enumerate(new.tokens):
            self._num_tokens += 1
            self.is_whole = new.finish_reason is not None and number + 1 == len(new.tokens)
            details = None
            if self.is_whole and self._asked.details:
                details = {
                    **_ending(self._asked, 0, new, self._num_tokens),
                    "input_length": output.num_prompt_tokens,
                    **_if_any(speculative_decoding=new.speculation),
                }
            event = {
                "index": self._num_tokens,
                "token": token,
                **_if_any(top_tokens=new.top_tokens and new.top_tokens[number]),
                "generated_text": self._text if self.is_whole else None,
                "details": details,
            }
            chunks.append(_as_event(event))
        return b"".join(chunks)


def _as_event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


def _ending(
    asked: Asked, index: int, continuation: Continuation, num_tokens: int
) -> dict[str, Any]:
    """Returns a continuation's finish reason, its number of tokens and its own seed."""
    return {
        "finish_reason": continuation.finish_reason,
        "generated_tokens": num_tokens,
        "seed": None if asked.seed is None else asked.seed + index,
    }


def _tokens(output: Output, continuation: Continuation) -> dict[str, Any]:
    """Returns the tokens of a prompt and a continuation, and what speculation did."""
    return {
        "prefill": output.prompt_tokens,
        "tokens": continuation.tokens,
        **_if_any(
            top_tokens=continuation.top_tokens, speculative_decoding=continuation.speculation
        ),
    }


def _if_any(**fields: Any) -> dict[str, Any]:
    """Returns the fields whose values are not empty."""
    return {name: value for name, value in fields.items() if value}
