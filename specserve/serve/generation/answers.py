"""Answers of the generation API, as Text Generation Inference writes them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from specserve.core.errors import GenerationError, GenerationErrorKind
from specserve.engine.text_request import (
    Continuation,
    FinishReason,
    Output,
    PromptToken,
    Token,
)
from specserve.serve.generation.schema import Generation

STATUSES: Mapping[GenerationErrorKind, int] = {
    "validation": 422,
    "generation": 424,
    "overloaded": 429,
    "incomplete_generation": 500,
}

TopTokens = tuple[tuple[Token, ...], ...]
Speculation = Mapping[str, Any] | UnsetType
"""What it did, where that is asked for."""


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """One of several continuations, and how it came about."""

    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: tuple[PromptToken, ...]
    tokens: tuple[Token, ...]
    top_tokens: TopTokens | UnsetType = UNSET
    speculative_decoding: Speculation = UNSET


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """How a text came about; the best of several."""

    finish_reason: FinishReason
    generated_tokens: int
    prompt_tokens: int
    seed: int | None
    prefill: tuple[PromptToken, ...]
    tokens: tuple[Token, ...]
    top_tokens: TopTokens | UnsetType = UNSET
    speculative_decoding: Speculation = UNSET
    best_of_sequences: tuple[Sequence, ...] | UnsetType = UNSET


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How a streamed text came about."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int
    speculative_decoding: Speculation = UNSET


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a stream; the last has the whole text."""

    index: int
    token: Token
    top_tokens: tuple[Token, ...] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


_encode = msgspec.json.Encoder().encode


def error_response(error: GenerationError) -> Response:
    """An error instead of an answer."""
    return Response(_error(error), STATUSES[error.kind], media_type="application/json")


def _error(error: GenerationError) -> bytes:
    return _encode({"error": str(error), "error_type": error.kind})


def whole_response(asked: Generation, output: Output, seconds: float, *, listed: bool) -> Response:
    """A whole answer.

    Args:
        asked: what was asked for.
        output: all of it.
        seconds: that it took.
        listed: whether the answer is a list of one.
    """
    best, *others = sorted(
        enumerate(output.continuations), key=lambda each: each[1].mean_logprob, reverse=True
    )
    index, continuation = best
    answer = Answer(generated_text=asked.before + continuation.text)
    if asked.details:
        details = Details(
            finish_reason=_finished(continuation),
            generated_tokens=continuation.num_tokens,
            prompt_tokens=output.num_prompt_tokens,
            seed=_seed(asked, index),
            prefill=output.prompt_tokens,
            tokens=continuation.tokens,
            top_tokens=continuation.top_tokens or UNSET,
            speculative_decoding=continuation.speculation or UNSET,
            best_of_sequences=tuple(_sequence(asked, output, *each) for each in others) or UNSET,
        )
        answer = Answer(generated_text=answer.generated_text, details=details)
    headers = {
        "x-prompt-tokens": str(output.num_prompt_tokens),
        "x-generated-tokens": str(continuation.num_tokens),
        "x-total-time": str(round(seconds * 1000)),
    }
    content = _encode([answer] if listed else answer)
    return Response(content, media_type="application/json", headers=headers)


async def events(
    asked: Generation, outputs: AsyncGenerator[Output, None]
) -> AsyncGenerator[bytes, None]:
    """An answer's events: one for each token, also where a step brought several.

    An error on the way is the last event. Closes ``outputs``.
    """
    async with aclosing(outputs):
        try:
            stream = _Stream(asked)
            async for output in outputs:
                if told := stream.take(output):
                    yield told
            if not stream.is_whole:
                message = "Incomplete generation stream"
                raise GenerationError("incomplete_generation", message)
        except GenerationError as error:
            yield _as_event(_error(error))


class _Stream:
    """A text as it is streamed.

    Args:
        asked: what was asked for.
    """

    def __init__(self, asked: Generation) -> None:
        self._asked = asked
        self._num_tokens = 0
        self._text = asked.before
        self.is_whole = False

    def take(self, output: Output) -> bytes:
        """The events of what has come now; none where no token has."""
        (new,) = output.continuations
        self._text += new.text
        told = []
        for number, token in enumerate(new.tokens):
            self._num_tokens += 1
            is_last = new.finish_reason is not None and number + 1 == len(new.tokens)
            details = None
            if is_last and self._asked.details:
                details = StreamDetails(
                    finish_reason=_finished(new),
                    generated_tokens=self._num_tokens,
                    seed=_seed(self._asked, 0),
                    input_length=output.num_prompt_tokens,
                    speculative_decoding=new.speculation or UNSET,
                )
            event = Event(
                index=self._num_tokens,
                token=token,
                top_tokens=new.top_tokens[number] if new.top_tokens else UNSET,
                generated_text=self._text if is_last else None,
                details=details,
            )
            told.append(_as_event(_encode(event)))
            self.is_whole = is_last
        return b"".join(told)


def _as_event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


def _sequence(asked: Generation, output: Output, index: int, other: Continuation) -> Sequence:
    return Sequence(
        generated_text=asked.before + other.text,
        finish_reason=_finished(other),
        generated_tokens=other.num_tokens,
        seed=_seed(asked, index),
        prefill=output.prompt_tokens,
        tokens=other.tokens,
        top_tokens=other.top_tokens or UNSET,
        speculative_decoding=other.speculation or UNSET,
    )


def _seed(asked: Generation, index: int) -> int | None:
    """The seed of one continuation: each has its own."""
    return None if asked.request.seed is None else asked.request.seed + index


def _finished(continuation: Continuation) -> FinishReason:
    assert continuation.finish_reason is not None, "the engine has ended it"
    return continuation.finish_reason
