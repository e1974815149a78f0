"""An engine with scripted outputs, in place of vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, cast

from fastapi import FastAPI
from starlette.requests import Request

from specserve.core.config import parse
from specserve.core.errors import GenerationError
from specserve.engine.text_request import (
    Asked,
    Continuation,
    FinishReason,
    Output,
    Token,
)
from specserve.serve.generation.routes import generation_router

if TYPE_CHECKING:
    from specserve.engine.text_generator import TextGenerator

MAX_TOTAL_TOKENS = 100


class ScriptedEngine:
    """Stands in for a ``TextGenerator``, with given outputs.

    Args:
        script: its outputs in order. An error is raised, and None waits forever.
    """

    def __init__(self, *script: Output | GenerationError | None) -> None:
        self.max_total_tokens = MAX_TOTAL_TOKENS
        self.max_concurrent_requests, self.num_tokenizers = 6, 2
        self.asked: list[Asked] = []
        self.ended = asyncio.Event()
        self._script = script

    async def generate(self, asked: Asked, call: Request) -> AsyncGenerator[Output, None]:
        self.asked.append(asked)
        try:
            for output in self._script:
                if output is None:
                    await asyncio.Event().wait()
                elif isinstance(output, GenerationError):
                    raise output
                else:
                    yield output
        finally:
            self.ended.set()

    def app(self) -> FastAPI:
        """The generation API of this engine."""
        config = parse({"model": {"path": "m", "served_name": "demo", "revision": "r1"}})
        app = FastAPI()
        app.include_router(generation_router(config, cast("TextGenerator", self)))
        return app


def token(number: int) -> Token:
    """A token whose text and log-probability contain its number."""
    return Token(number, f" t{number}", -number / 8, False)


def step(
    *numbers: int, finish: FinishReason | None = None, top: Sequence[Sequence[int]] = ()
) -> Output:
    """The output of one step: its tokens, and a finish reason in the last step."""
    continuation = Continuation(
        text="".join(f" t{number}" for number in numbers),
        num_tokens=len(numbers),
        tokens=tuple(map(token, numbers)),
        top_tokens=tuple(tuple(map(token, each)) for each in top),
        finish_reason=finish,
    )
    return Output(num_prompt_tokens=7, continuations=(continuation,))
