"""Reads the response formats of Text Generation Inference, which vLLM ignores or cannot read.

Hugging Face's client sends them for OpenAI's: ``{"type": "json_object", "value": SCHEMA}``.
"""

from __future__ import annotations

import json

from pydantic import ValidationError

from specserve.core.errors import GenerationError, RequestError
from specserve.serve.generation.schema import Grammar

_ALLOWED = 'json_schema as OpenAI has it, or "type" json_object or regex with a "value"'


def for_vllm(body: bytes) -> bytes:
    """A request's body, with such a format as vLLM's ``structured_outputs``; others as they are.

    Raises:
        RequestError: the format has a value that is none of its type.
    """
    if b'"response_format"' not in body or b'"value"' not in body:
        return body
    try:
        request = json.loads(body)
        given = request.get("response_format")
    except (ValueError, RecursionError, AttributeError):
        return body
    if not isinstance(given, dict) or given.get("value") is None or given.get("json_schema"):
        return body
    try:
        kind, value = Grammar.model_validate(given).constraint()
    except (ValidationError, GenerationError):
        raise RequestError("response_format", given, _ALLOWED) from None
    if request.get("structured_outputs"):
        raise RequestError("response_format", given, "only without structured_outputs")
    del request["response_format"]
    return json.dumps(request | {"structured_outputs": {kind: value}}).encode()
