"""What the generation API asks of the engine and what it gets: frozen values, no vLLM."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
from starlette.requests import Request

FinishReason = Literal["length", "eos_token", "stop_sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A text to continue, and how.

    Attributes:
        truncate: number of the text's last tokens that are kept; None: all.
        max_new_tokens: most tokens to generate; None: the rest of the context.
        temperature: 0 is greedy.
        top_k: number of tokens kept; 0: all.
        top_p: share of probability kept; 1: all.
        typical_p: share of probability kept of the most typical of these tokens; None: all.
        repetition_penalty: divides the logits of tokens that are in the text; 1: none.
        frequency_penalty: taken off a token's logit each time that it was generated; 0: none.
        seed: random seed of the first continuation, the others count up; None: the engine's.
        watermark: favour half of the vocabulary, by the token before.
        grammar: a JSON schema under ``json`` or an expression under ``regex``; None: any text.
        adapter_id: name of a LoRA adapter; empty: the model itself.
        streams: whether the outputs come step by step; otherwise once, at the end.
        details: whether the answer tells how it came about.
        num_top_tokens: most likely tokens to report beside each one.
        with_prompt: report the prompt's tokens; not while streaming.
        extra_args: further arguments for the engine, as JSON has them.
        before: what stands before each generated text in the answer.
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
    """A token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class Token(msgspec.Struct, frozen=True):
    """A generated token."""

    id: int
    text: str
    """What it adds to the text. A character of several tokens is the last one's."""
    logprob: float
    special: bool
    """Whether it is left out of the whole text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What is new of one continuation; all of it where nothing is streamed.

    Attributes:
        text: without special tokens, with the stop string.
        num_tokens: the end token included.
        tokens: each of them, if asked for.
        top_tokens: the most likely ones at each position, if asked for.
        mean_logprob: of its tokens, where there are several continuations.
        finish_reason: None: it goes on.
        speculation: what it did, at the end, if asked for.
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
    """What one or several steps have brought.

    Attributes:
        continuations: one while streaming, otherwise all of the request's.
        prompt_tokens: of the prompt as it was used, if asked for.
    """

    num_prompt_tokens: int
    continuations: tuple[Continuation, ...]
    prompt_tokens: tuple[PromptToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine takes."""

    max_total_tokens: int
    """Of a prompt and its continuation."""
    max_concurrent_requests: int
    """Decoded and waiting."""
    num_tokenizers: int = 1


class TextEngine(Protocol):
    """What continues texts."""

    @property
    def limits(self) -> Limits:
        """What it takes."""
        ...

    def generate(self, request: TextRequest, call: Request) -> AsyncGenerator[Output, None]:
        """Continues a text; ends the work when it is closed.

        Args:
            request: what is asked for.
            call: the HTTP request that it came by, whose headers may name it.

        Raises:
            GenerationError: the request is refused, or cannot be answered to its end.
        """
        ...
