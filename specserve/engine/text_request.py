"""Requests and outputs of the generation API, and the engine's interface. Imports no vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
from starlette.requests import Request

FinishReason = Literal["length", "eos_token", "stop_sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A text to continue, with the sampling parameters.

    Attributes:
        truncate: number of the text's last tokens to keep; None: all.
        max_new_tokens: most tokens to generate; None: the rest of the context.
        temperature: 0 is greedy.
        top_k: number of tokens kept; 0: all.
        top_p: probability mass kept; 1: all.
        typical_p: probability mass kept, of the most typical of these tokens; None: all.
        repetition_penalty: divides the logits of tokens that are in the text; 1: none.
        frequency_penalty: subtracted from a token's logit for each time it was generated; 0: none.
        seed: seed of the first continuation, +1 for each further one; None: the engine's.
        watermark: favours half of the vocabulary, chosen by the token before.
        grammar: a JSON schema under ``json`` or an expression under ``regex``; None: any text.
        adapter_id: name of a LoRA adapter; empty: the base model.
        streams: whether outputs come after each step; otherwise there is one at the end.
        details: whether the answer reports tokens, log-probabilities and finish reason.
        num_top_tokens: number of most likely tokens to report at each position.
        with_prompt: whether to report the prompt's tokens; not while streaming.
        extra_args: further arguments for the engine, JSON values.
        before: text that the answer puts before each generated text.
    """

    inputs: str
    truncate: int | None = None
    max_new_tokens: int | None = None
    num_sequences: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    watermark: bool = False
    grammar: Mapping[str, Any] | None = None
    adapter_id: str = ""
    streams: bool = False
    details: bool = False
    num_top_tokens: int = 0
    with_prompt: bool = False
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    before: str = ""

    @property
    def with_tokens(self) -> bool:
        """Whether each token is reported with its text and log-probability."""
        return self.details or self.streams


class PromptToken(msgspec.Struct, frozen=True):
    """A prompt token; the first one has no log-probability."""

    id: int
    text: str
    logprob: float | None


class Token(msgspec.Struct, frozen=True):
    """A generated token."""

    id: int
    text: str
    """The text that it adds. The last token of a multi-token character adds the character."""
    logprob: float
    special: bool
    """Whether the continuation's text leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The new part of one continuation while streaming, otherwise all of it.

    Attributes:
        text: without special tokens, with the stop string.
        num_tokens: number of tokens, with the end token.
        tokens: all tokens, if requested.
        top_tokens: the most likely tokens at each position, if requested.
        mean_logprob: mean log-probability of the tokens, if there are several continuations.
        finish_reason: None while it goes on.
        speculation: draft and acceptance counts in the last output, if requested.
    """

    text: str
    num_tokens: int
    tokens: tuple[Token, ...] = ()
    top_tokens: tuple[tuple[Token, ...], ...] = ()
    mean_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    speculation: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The result of one or several steps of a request.

    Attributes:
        continuations: one while streaming, otherwise all of the request.
        prompt_tokens: tokens of the truncated prompt, if requested.
    """

    num_prompt_tokens: int
    continuations: tuple[Continuation, ...]
    prompt_tokens: tuple[PromptToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the engine."""

    max_total_tokens: int
    """Tokens of a prompt and its continuation together."""
    max_concurrent_requests: int
    """Running and waiting requests."""
    num_tokenizers: int = 1


class TextEngine(Protocol):
    """An engine that continues texts."""

    @property
    def limits(self) -> Limits:
        """The engine's limits."""
        ...

    def generate(self, request: TextRequest, call: Request) -> AsyncGenerator[Output, None]:
        """Continues a text. Closing the generator aborts the request.

        Args:
            request: the text and its parameters.
            call: the HTTP request; its headers may contain a request id.

        Raises:
            GenerationError: the request is refused or fails.
        """
        ...
