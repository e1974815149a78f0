"""Chains of references in JSON schemas that would end the process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from specserve.engine.schema_references import MAX_DEPTH, check_references


def chain(length: int) -> dict[str, Any]:
    """A schema of so many definitions, each an object with a property of the next one."""
    links = {
        f"a{number}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{number + 1}"}}}
        for number in range(length)
    }
    return {"$defs": {**links, f"a{length}": {"type": "string"}}, "$ref": "#/$defs/a0"}


LONGEST = MAX_DEPTH // 5
"""Each link of :func:`chain` adds five levels."""


def tag(schema: dict[str, Any]) -> str:
    structure = {"begin": "<a>", "schema": schema, "end": "</a>"}
    return json.dumps({"type": "structural_tag", "structures": [structure], "triggers": ["<a>"]})


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": chain(20_000)},
        {"json": json.dumps(chain(20_000))},
        {"json": json.dumps(chain(20_000)).replace("$ref", "\\u0024ref")},
        {"structural_tag": tag(chain(20_000))},
    ],
)
def test_a_long_chain_is_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match=f"at most {MAX_DEPTH} levels"):
        check_references(StructuredOutputsParams(**wanted))


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        {"regex": "a"},
        {"json": chain(LONGEST - 1)},
        {"json": {"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}},
        {"json": "no JSON, which vLLM refuses"},
        {"json": "[" * 100_000 + "]" * 100_000},  # vLLM refuses it, too
        {"json": "1"},
        {"json": '[[1], "text"]'},
    ],
)
def test_other_schemas_are_allowed(wanted: dict[str, Any] | None) -> None:
    check_references(None if wanted is None else StructuredOutputsParams(**wanted))


def test_the_longest_allowed_chain_leaves_the_process_alive() -> None:
    code = f"import xgrammar; xgrammar.Grammar.from_json_schema({json.dumps(chain(LONGEST))!r})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
