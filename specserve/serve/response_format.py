"""Reads the response formats of Text Generation Inference, which vLLM ignores or cannot read.

Hugging Face's client sends them for OpenAI's: ``{"type": "json_object", "value": SCHEMA}``.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from specserve.core.errors import GenerationError, RequestError
from specserve.serve.generation.schema import Grammar

_ALLOWED = 'json_schema as OpenAI has it, or "type" json_object or regex with a "value"'


def for_vllm(request: dict[str, Any]) -> dict[str, Any]:
    """A request, with such a format as vLLM's ``structured_outputs``; others as they are.

    Raises:
        RequestError: the format has a value that is none of its type.
    """
    given = request.get("response_format")
    if not isinstance(given, dict) or given.get("value") is None or given.get("json_schema"):
        return request
    try:
        structured = Grammar.model_validate(given).constraint()
    except (ValidationError, GenerationError):
        raise RequestError("response_format", given, _ALLOWED) from None
    if request.get("structured_outputs"):
        raise RequestError("response_format", given, "only without structured_outputs")
    others = {key: each for key, each in request.items() if key != "response_format"}
    return others | {"structured_outputs": structured}
