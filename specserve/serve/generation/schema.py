"""Requests of the generation API. Names, limits and defaults: Text Generation Inference (TGI)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specserve.core.errors import GenerationError
from specserve.engine.text_request import TextRequest

MAX_BEST_OF = 2
MAX_STOP_SEQUENCES = 4
MAX_TOP_N_TOKENS = 5
MAX_TEMPERATURE = 2.0
"""vLLM's limit; TGI has none."""
_MAX_I32 = 2**31 - 1
_MAX_U64 = 2**64 - 1

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
    seed: Annotated[int, Field(ge=0, le=_MAX_U64)] | None = None
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


def text_request(
    body: GenerateBody, max_total_tokens: int, *, streams: bool, full_text: bool = False
) -> TextRequest:
    """Converts a body to the engine's request; ``full_text``: default of ``return_full_text``.

    Raises:
        GenerationError: fields cannot be combined, or ``truncate`` is too large for the model.
    """
    given = body.parameters or Parameters(do_sample=True)
    with_prompt = bool(given.decoder_input_details)
    details = bool(given.details) or with_prompt
    if given.return_full_text is not None:
        full_text = given.return_full_text
    _check(given, max_total_tokens, streams=streams)
    seed = given.seed if given.samples else None
    if given.samples and seed is None and details:
        seed = secrets.randbits(63)  # the details report it
    return TextRequest(
        inputs=body.inputs,
        truncate=given.truncate,
        max_new_tokens=given.max_new_tokens,
        num_sequences=given.best_of or 1,
        temperature=(given.temperature or 1.0) if given.samples else 0.0,
        top_k=given.top_k or 0,
        top_p=given.top_p or 1.0,
        typical_p=given.typical_p,
        repetition_penalty=given.repetition_penalty or 1.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        seed=seed,
        stop=(given.stop,) if isinstance(given.stop, str) else tuple(given.stop or ()),
        watermark=bool(given.watermark),
        grammar=given.grammar.constraint() if given.grammar else None,
        adapter_id=given.adapter_id or "",
        streams=streams,
        details=details,
        num_top_tokens=given.top_n_tokens or 0,
        with_prompt=with_prompt,
        extra_args=body.vllm_xargs or {},
        before=body.inputs if full_text else "",
    )


def _check(given: Parameters, max_total_tokens: int, *, streams: bool) -> None:
    if (given.best_of or 1) > 1:
        if streams:
            rule = "!= 1 is not supported when streaming tokens"
            raise GenerationError.of_field("best_of", rule, given.best_of)
        if not given.samples:
            reason = f"you must use sampling when `best_of` is > 1. Given: {given.best_of}"
            raise GenerationError.invalid(reason)
        if given.seed is not None:
            rule = "must not be set when `best_of` > 1"
            raise GenerationError.of_field("seed", rule, given.seed)
    if streams and given.decoder_input_details:
        rule = "== true is not supported when streaming tokens"
        raise GenerationError.of_field("decoder_input_details", rule, True)
    if given.truncate is not None and given.truncate >= max_total_tokens:
        rule = f"must be strictly positive and less than {max_total_tokens}"
        raise GenerationError.of_field("truncate", rule, given.truncate)


RULES = {
    "inputs": "cannot be empty, and must be a string",
    "parameters": "must be an object",
    "vllm_xargs": "must be an object",
    "best_of": f"must be > 0 and <= {MAX_BEST_OF}",
    "temperature": "must be strictly positive",
    "top_k": "must be strictly positive",
    "top_p": "must be > 0.0 and < 1.0",
    "typical_p": "must be > 0.0 and < 1.0",
    "repetition_penalty": "must be strictly positive",
    "frequency_penalty": "must be >= -2.0 and <= 2.0",
    "max_new_tokens": "must be strictly positive",
    "stop": f"supports up to {MAX_STOP_SEQUENCES} stop sequences, none of them empty",
    "truncate": "must be strictly positive",
    "seed": f"must be >= 0 and <= {_MAX_U64}",
    "top_n_tokens": f"must be >= 0 and <= {MAX_TOP_N_TOKENS}",
    "grammar": 'must have the "type" json, json_object, json_schema or regex, and a "value"',
    "adapter_id": "must be a string",
    **dict.fromkeys(
        (
            "do_sample",
            "details",
            "decoder_input_details",
            "return_full_text",
            "watermark",
            "stream",
        ),
        "must be a boolean",
    ),
}
"""The rule of each field, for error messages; in TGI's words if TGI has the rule."""

_POSITIVE = ("temperature", "top_k", "repetition_penalty", "max_new_tokens", "truncate")
_OTHER_RULES = {
    "less_than_equal": "must be <= {le}",
    "int_type": "must be an integer",
    "float_type": "must be a number",
}
"""Other rules of the ``_POSITIVE`` fields, by the type of pydantic's error. TGI's sentences for
these fields state only the lower limit."""


def refusal(errors: Sequence[Mapping[str, Any]]) -> GenerationError:
    """Converts the first of pydantic's errors; the message has field, rule and value."""
    error = errors[0]
    field = next((part for part in reversed(error["loc"]) if part in RULES), None)
    if error["type"] == "json_invalid":
        reason = f"the body is not valid JSON: {error['ctx']['error']}"
    elif field is None:
        reason = "the body must be a JSON object, of content type application/json"
    else:
        rule = RULES[field]
        if field in _POSITIVE:
            rule = _OTHER_RULES.get(error["type"], rule).format_map(error.get("ctx", {}))
        given = None if error["type"] == "missing" else error["input"]
        return GenerationError.of_field(str(field), rule, given)
    return GenerationError.invalid(reason)
