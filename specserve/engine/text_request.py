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
        inputs: the text.
        truncate: number of its last tokens that are kept; None: all.
        max_new_tokens: most tokens to generate; None: the rest of the context.
        num_sequences: continuations of the same text.
        temperature: 0 is greedy.
        top_k: number of tokens kept; 0: all.
        top_p: share of probability kept, 0 < top_p <= 1.
        typical_p: share of probability kept of the most typical of these tokens; None: all.
        repetition_penalty: divides the logits of tokens that are in the text; 1: none.
        frequency_penalty: taken off a token's logit each time that it was generated; 0: none.
        seed: random seed of the first continuation, the others count up; None: the engine's.
        stop: strings at whose end a continuation ends.
        watermark: favour half of the vocabulary, by the token before.
        grammar: a JSON schema under ``json`` or an expression under ``regex``; None: any text.
        adapter_id: name of a LoRA adapter; empty: the model itself.
        streams: whether the outputs come step by step; otherwise once, at the end.
        with_tokens: report each token with its text and log-probability.
        num_top_tokens: most likely tokens to report beside it.
        with_prompt: report the prompt's tokens; not while streaming.
        extra_args: for the engine's logits processors and other parts of it.
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
    with_tokens: bool = False
    num_top_tokens: int = 0
    with_prompt: bool = False
    extra_args: Mapping[str, Any] = field(default_factory=dict)


class PromptToken(msgspec.Struct, frozen=True):
    """A token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class Token(msgspec.Struct, frozen=True):
    """A generated token.

    Attributes:
        id: in the vocabulary.
        text: what it adds to the text. A character of several tokens is the last one's.
        logprob: natural logarithm of its probability.
        special: whether it is left out of the whole text.
    """

    id: int
    text: str
    logprob: float
    special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What is new of one continuation; all of it where nothing is streamed.

    Attributes:
        text: without special tokens, with the stop string.
        num_tokens: the end token included.
        tokens: one for each, if asked for.
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
        num_prompt_tokens: of the prompt, as it was used.
        prompt_tokens: each of them, if asked for.
        continuations: one while streaming, otherwise all of the request's.
    """

    num_prompt_tokens: int
    continuations: tuple[Continuation, ...]
    prompt_tokens: tuple[PromptToken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine takes.

    Attributes:
        max_total_tokens: of a prompt and its continuation.
        max_concurrent_requests: decoded and waiting.
        num_tokenizers: threads that tokenize.
    """

    max_total_tokens: int
    max_concurrent_requests: int
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
