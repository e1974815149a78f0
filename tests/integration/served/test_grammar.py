"""Structured outputs over HTTP: the text stays the same, and forced tokens become drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from tests.integration.api import MODEL, OFF, REPORT, TIMEOUT_S, Api
from tests.integration.cluster import Deployment, eventually

pytestmark = pytest.mark.timeout(900)

ALONE = {"speculation": "grammar"}
"""Only the grammar gives drafts."""
PROMPT = "A customer's order:\n"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_number": {"type": "integer", "minimum": 0, "maximum": 99},
        "shipping_address": {
            "type": "object",
            "properties": {"country": {"enum": ["Germany", "Greece"]}},
            "required": ["country"],
            "additionalProperties": False,
        },
        "states": {
            "type": "array",
            "items": {"enum": ["paid", "sent"]},
            "minItems": 2,
            "maxItems": 3,
        },
    },
    "required": ["customer_number", "shipping_address", "states"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "order", "strict": True, "parameters": SCHEMA}}


def accepted(api: Api) -> int:
    """Accepted draft tokens of grammars so far."""
    counted = api.speculation()["acceptance"].get("grammar", {})
    return int(counted.get("accepted_tokens", 0))


def check_drafted(api: Api, grammar: dict[str, Any]) -> None:
    """Asserts that drafts are accepted and the text is the same as without them."""
    body = {"prompt": PROMPT, "max_tokens": 256, "structured_outputs": grammar}
    plain = api.complete(**body, vllm_xargs=OFF)["choices"][0]
    before = accepted(api)

    def is_drafted() -> bool:
        """Not yet while the grammar is being compiled."""
        drafted = api.complete(**body, vllm_xargs=ALONE)["choices"][0]
        assert (drafted["text"], drafted["finish_reason"]) == (plain["text"], "stop")
        return accepted(api) > before

    eventually(is_drafted, "accepted drafts", TIMEOUT_S)


@pytest.mark.parametrize(
    "grammar",
    [
        {"json": SCHEMA},
        {"regex": r"The order (of|with) \d{2} items was (sent|delayed) yesterday\."},
        {"choice": ["The first one is taken.", "The second one is taken."]},
        {"grammar": 'root ::= "SELECT customer_name FROM " ("orders" | "addresses") " LIMIT 10"'},
    ],
    ids=lambda grammar: next(iter(grammar)),
)
def test_the_text_is_the_same_and_forced_tokens_are_accepted(
    api: Api, grammar: dict[str, Any]
) -> None:
    check_drafted(api, grammar)


def test_a_response_format_and_a_strict_tool_give_drafts_too(api: Api) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 256}
    named = {"type": "function", "function": {"name": "order"}}

    def written(options: dict[str, Any], xargs: dict[str, str]) -> str:
        message = api.chat(**chat, **options, vllm_xargs=xargs)["choices"][0]["message"]
        calls = message.get("tool_calls") or [{"function": {"arguments": message["content"]}}]
        return str(calls[0]["function"]["arguments"])

    for options in (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        {"tools": [TOOL], "tool_choice": named},
    ):
        before, plain = accepted(api), written(options, OFF)
        if "response_format" in options:  # a strict tool's text may repeat whitespace without end
            jsonschema.validate(json.loads(plain), SCHEMA)
        for _ in range(20):  # the grammar may still be compiling during the first ones
            assert written(options, ALONE) == plain
            if accepted(api) > before:
                break
        assert accepted(api) > before


def test_each_request_in_a_batch_has_its_own_grammar(api: Api) -> None:
    schemas = [SCHEMA, {"enum": ["yes, certainly", "no, never"]}, SCHEMA["properties"]["states"]]
    expected = [
        api.complete(
            prompt=PROMPT,
            max_tokens=256,
            structured_outputs={"json": schema},
            vllm_xargs=OFF,
        )["choices"][0]["text"]
        for schema in schemas
    ]
    with ThreadPoolExecutor(len(schemas)) as pool:
        asked = pool.map(
            lambda schema: api.complete(
                prompt=PROMPT,
                max_tokens=256,
                structured_outputs={"json": schema},
                vllm_xargs=ALONE | REPORT,
            ),
            schemas * 2,
        )
        answers = list(asked)
    assert [each["choices"][0]["text"] for each in answers] == expected * 2
    sources = [each["metrics"]["speculative_decoding"]["sources"] for each in answers]
    drafted = [each["grammar"]["drafted_tokens"] for each in sources]
    assert any(drafted), "no drafts: the comparison shows nothing"


def test_a_request_without_a_grammar_gets_no_drafts(api: Api) -> None:
    before = api.counts("grammar")
    api.complete(prompt=PROMPT, max_tokens=32, vllm_xargs=ALONE)
    assert api.counts("grammar") == before


def test_a_schema_with_a_long_chain_of_references_ends_no_process(api: Api) -> None:
    links = {
        f"a{number}": {"type": "array", "items": {"$ref": f"#/$defs/a{number + 1}"}}
        for number in range(20_000)
    }
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8}
    wanted = {"json": {"$defs": links | {"a20000": {"type": "string"}}, "$ref": "#/$defs/a0"}}
    response = api.http.post("/v1/completions", json=body | {"structured_outputs": wanted})
    assert response.status_code == 400
    assert "references may lead through at most 4000 levels" in response.text
    assert api.complete(**body)["choices"]


def test_a_grammar_that_vllm_refuses_affects_no_other_request(api: Api) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "structured_outputs": {"grammar": "root ::= nothing"}}
    assert api.http.post("/v1/completions", json=body).status_code == 400
    check_drafted(api, {"json": SCHEMA})
    sources = {each["kind"]: each for each in api.speculation()["sources"]}
    assert sources["grammar"]["up"]


@pytest.fixture
def client(api: Api) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{api.base_url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0
    ) as client:
        yield client


def test_a_disconnect_ends_the_request_and_the_next_one_gets_drafts(
    api: Api, client: OpenAI, shared: Deployment
) -> None:
    endless = {"type": "array", "items": SCHEMA, "minItems": 100}
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=1500,
        stream=True,
        extra_body={"structured_outputs": {"json": endless}, "vllm_xargs": ALONE},
    )
    next(iter(stream))
    stream.close()
    shared.eventually(
        lambda: api.metric("vllm:num_requests_running") == 0, "the request has ended", 60
    )
    check_drafted(api, {"json": SCHEMA})
