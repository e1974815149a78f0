"""Checks requests of the generation API, with errors in the words of TGI."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from specserve.core.errors import GenerationError
from specserve.engine.text_request import (
    MAX_BEST_OF,
    MAX_SEED,
    MAX_STOP_SEQUENCES,
    MAX_TOP_N_TOKENS,
    Asked,
    GenerateBody,
    Parameters,
)


def checked(
    body: GenerateBody, max_total_tokens: int, *, streams: bool = False, full_text: bool = False
) -> Asked:
    """Checks a body; ``full_text``: default of ``return_full_text``.

    Raises:
        GenerationError: fields cannot be combined, or ``truncate`` is too large for the model.
    """
    given = body.parameters or Parameters(do_sample=True)
    _check(given, max_total_tokens, streams=streams)
    if given.return_full_text is not None:
        full_text = given.return_full_text
    asked = Asked(body, given, streams, full_text, given.seed if given.samples else None)
    if given.samples and asked.seed is None and asked.details:
        return asked._replace(seed=secrets.randbits(63))  # the details report it
    return asked


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
    "seed": f"must be >= 0 and <= {MAX_SEED}",
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
