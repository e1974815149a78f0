"""Refuses a JSON schema whose references would exhaust the stack of the process that reads it.

xgrammar follows each ``$ref`` by a recursive call. Some thousand definitions that refer to each
other in a chain end the process. vLLM limits only how deeply a schema is nested.
"""

from __future__ import annotations

import json
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

MAX_DEPTH = 4000
"""Most levels of a chain. A stack of 8 MiB suffices for 10,000, and not for 20,000."""


def check_references(wanted: StructuredOutputsParams | None) -> None:
    """Checks the schema of a request's structured output.

    Raises:
        VLLMValidationError: the schema has more references than the stack has room for.
    """
    if wanted is None:
        return
    for schema in (wanted.json, wanted.structural_tag):
        if schema and (depth := _depth(schema)) > MAX_DEPTH:
            raise VLLMValidationError(
                f"The JSON schema's references may lead through at most {MAX_DEPTH} levels of "
                f"objects and arrays, got up to {depth}"
            )


def _depth(schema: str | dict[str, Any]) -> int:
    """Upper bound of the levels that a chain of references leads through, each taken once.

    This is the sum over the targets, each with the deepest place of a reference to it.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):  # vLLM refuses it
            return 0
    depths: dict[str, int] = {}
    level: list[Any] = [schema] if isinstance(schema, dict | list) else []
    number = 0
    while level:
        number += 1
        for node in level:
            if isinstance(node, dict) and isinstance(target := node.get("$ref"), str):
                depths[target] = number
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
    return sum(depths.values())
