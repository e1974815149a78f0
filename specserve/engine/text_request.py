"""Requests and outputs of the generation API. Imports no vLLM.

Names, limits and defaults of requests: Text Generation Inference (TGI).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from specserve.core.errors import GenerationError

FinishReason = Literal["length", "eos_token", "stop_sequence"]


MAX_BEST_OF = 2
MAX_STOP_SEQUENCES = 4
MAX_TOP_N_TOKENS = 5
MAX_TEMPERATURE = 2.0
"""vLLM's limit; TGI has none."""
_MAX_I32 = 2**31 - 1
MAX_SEED = 2**64 - 1

_MIN_POSITIVE = 2.0**-149  # smaller values are 0 in float32, which TGI reads and vLLM computes with
Share = Annotated[float, Field(ge=_MIN_POSITIVE, lt=1)]
Positive = Annotated[float, Field(ge=_MIN_POSITIVE)]
Count = Annotated[int, Field(ge=1, le=_MAX_I32)]
StopText = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    """Base class: as in TGI, unknown keys are ignored, and null counts as absent."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class Grammar(_Part):
    """Constrains the text to a JSON schema or to a regular expression."""

    type: Literal["json", "json_object", "json_schema", "regex"]
    value: str | dict[str, Any]

    def constraint(self) -> dict[str, Any]:
        """Returns the constraint in the form of vLLM's ``structured_outputs``.

        Raises:
            GenerationError: the type is regex and the value is not a string.
        """
        value = self.value
        if self.type == "json_schema" and isinstance(value, dict) and "schema" in value:
            value = value["schema"]  # the value may also hold the schema's name
        if self.type != "regex":
            return {"json": value}
        if not isinstance(value, str):
            raise GenerationError.of_field("grammar", "of type regex must be a string", value)
        return {"regex": value}


class Parameters(_Part):
    """The sampling parameters and the options of the answer."""

    best_of: Annotated[int, Field(ge=1, le=MAX_BEST_OF)] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=_MIN_POSITIVE, le=MAX_TEMPERATURE)] | None = None
    top_k: Count | None = None
    top_p: Share | None = None
    typical_p: Share | None = None
    repetition_penalty: Positive | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    max_new_tokens: Count | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    truncate: Count | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=MAX_TOP_N_TOKENS)] | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    return_full_text: bool | None = None
    watermark: bool | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled; otherwise decoding is greedy."""
        cuts = (self.top_k, self.top_p, self.typical_p)
        has_temperature = self.temperature not in (None, 1.0)
        return bool(self.do_sample) or has_temperature or any(cut is not None for cut in cuts)


class GenerateBody(_Part):
    """The body of a request."""

    inputs: str = Field(min_length=1)
    parameters: Parameters | None = None
    stream: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    """Arguments for the engine. ``ControlsMiddleware`` has already read speculation controls."""


class Asked(NamedTuple):
    """A checked request."""

    body: GenerateBody
    given: Parameters
    """The body's parameters."""
    streams: bool = False
    """Whether outputs come after each step; otherwise there is one at the end."""
    full_text: bool = False
    """Whether the answer puts the prompt before each generated text."""
    seed: int | None = None
    """Seed of the first continuation, +1 for each further one; None: the engine's."""

    @property
    def details(self) -> bool:
        """Whether the answer reports tokens, log-probabilities and finish reason."""
        return bool(self.given.details or self.given.decoder_input_details)

    @property
    def with_tokens(self) -> bool:
        """Whether each token is reported with its text and log-probability."""
        return self.details or self.streams

    @property
    def before(self) -> str:
        """Text that the answer puts before each generated text."""
        return self.body.inputs if self.full_text else ""


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
