from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from specserve.engine.tenants import CURRENT_CALL, CURRENT_CONTROLS, RESERVED
from specserve.serve.controls import ControlsMiddleware

WIDE = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body that reached it."""
    body = await Request(scope, receive).body()
    await Response(body)(scope, receive, send)


@pytest.fixture
def client() -> TestClient:
    return TestClient(ControlsMiddleware(echo, ["ngram"]))


def test_a_valid_body_in_pieces_arrives_whole(
    client: TestClient,
) -> None:
    body = json.dumps({"prompt": "x" * 100, "vllm_xargs": {"speculation": "ngram"}}).encode()

    def pieces() -> Iterator[bytes]:
        yield from (body[:20], body[20:90], body[90:])

    assert client.post("/v1/completions", content=pieces()).content == body


def test_a_call_that_ends_holds_no_place_in_the_engine() -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        RESERVED[CURRENT_CALL.get()] += 3
        await Response(status_code=400)(scope, receive, send)

    client = TestClient(ControlsMiddleware(refuse, []))
    assert client.post("/v1/completions", json={}).status_code == 400
    assert not RESERVED


@pytest.mark.parametrize(
    ("body", "argument"),
    [
        (b'{"vllm_xargs": {"max_draft_tokens": -1}}', "max_draft_tokens"),
        (b'{"vllm_xargs": {"specserve_typical": "x"}}', "specserve_typical"),
        (b'{"vllm_xargs": {"specserve_tenant": "b"}}', "specserve_tenant"),
        (b'{"vllm_\\u0078args": {"specserve\\u005ftenant": "b"}}', "specserve_tenant"),
        (
            b'{"vllm_xargs": {}, "vllm_xargs": {"learn": 0, "specserve_tenant": null}}',
            "specserve_tenant",
        ),
        (b'{"vllm_xargs": {"specserve_\\ud800": 1}}', "specserve_\\ud800"),  # half a pair
    ],
)
def test_an_argument_that_is_not_allowed_never_reaches_the_application(
    client: TestClient, body: bytes, argument: str
) -> None:
    answer = client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"vllm_xargs.{argument}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"vllm_xargs": {"beam_sample": 1}},
            "vllm_xargs.beam_sample: 1 is not allowed; allowed: 0",
        ),
        (
            {"use_beam_search": True, "vllm_xargs": {"beam_sample": 2}},
            "vllm_xargs.beam_sample: 2 is not allowed; allowed: 0 or 1",
        ),
        ({"use_beam_search": True, "stream": True}, "stream: True is not allowed; allowed: false"),
    ],
)
def test_unsupported_beam_searches_are_refused(
    client: TestClient, body: dict[str, object], words: str
) -> None:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(words)


@pytest.mark.parametrize(
    "body",
    [
        {"use_beam_search": True, "vllm_xargs": {"beam_sample": 1}},
        {"use_beam_search": False, "stream": True, "vllm_xargs": {"beam_sample": 0}},
    ],
)
def test_supported_beam_searches_reach_the_application(
    client: TestClient, body: dict[str, object]
) -> None:
    assert client.post("/v1/completions", json=body).json() == body


@pytest.mark.parametrize(
    "more",
    [
        {"use_beam_search": True, "stream": True},
        {"prediction": "x"},
        {"sampling_params": {"extra_args": {"max_draft_tokens": -1}}},
    ],
)
def test_the_generation_api_ignores_fields_of_other_routes(
    client: TestClient, more: dict[str, Any]
) -> None:
    body = json.dumps({"inputs": "a", **more, "vllm_xargs": {"learn": 0}}).encode()
    assert client.post("/v1/completions", content=body).status_code == 400
    assert client.post("/generate", content=body).content == body


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_a_refusal_of_the_generation_api_has_its_own_form(path: str, root_path: str) -> None:
    client = TestClient(ControlsMiddleware(echo, ["ngram"]), root_path=root_path)
    answer = client.post(root_path + path, json={"inputs": "x", "vllm_xargs": {"learn": 2}})
    assert answer.status_code == 422
    message = "Input validation error: vllm_xargs.learn: 2 is not allowed; allowed: 0 or 1"
    assert answer.json() == {"error": message, "error_type": "validation"}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "structured"),
    [
        ({"type": "json_object", "value": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json", "value": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"type": "regex", "value": "[0-9]+"}, {"regex": "[0-9]+"}),
    ],
)
def test_a_response_format_of_tgi_becomes_structured_outputs(
    client: TestClient, given: dict[str, Any], structured: dict[str, Any]
) -> None:
    body = {"messages": [], "response_format": given, "vllm_xargs": {"learn": 0}}
    reached = client.post("/v1/chat/completions", json=body).json()
    del body["response_format"]
    assert reached == body | {"structured_outputs": structured}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "value", "schema": SCHEMA}},
        {"type": "text", "value": None},
        {"type": "json_object", "value": None},
        "value",
    ],
)
def test_other_response_formats_are_left_to_vllm(client: TestClient, given: object) -> None:
    body = json.dumps({"value": 1, "response_format": given}).encode()
    assert client.post("/v1/chat/completions", content=body).content == body


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "regex", "value": {"a": 1}}},
        {"response_format": {"type": "choice", "value": ["a"]}},
        {
            "response_format": {"type": "regex", "value": "a"},
            "structured_outputs": {"regex": "b"},
        },
    ],
)
def test_an_invalid_response_format_is_refused(client: TestClient, more: dict[str, Any]) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": [], **more})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert client.post("/generate", json={"inputs": "x", **more}).status_code == 200


BAD = {"prompt": "x", "vllm_xargs": {"max_draft_tokens": -1}}


@pytest.mark.parametrize("codec", ["utf-8-sig", *WIDE])
def test_controls_are_checked_in_each_encoding_of_json(client: TestClient, codec: str) -> None:
    answer = client.post("/v1/completions", content=json.dumps(BAD).encode(codec))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "vllm_xargs.max_draft_tokens"


@pytest.mark.parametrize("codec", WIDE)
def test_a_valid_body_in_a_wide_encoding_is_not_changed(client: TestClient, codec: str) -> None:
    body = json.dumps({"prompt": "vllm_xargs"}).encode(codec)
    assert client.post("/v1/completions", content=body).content == body


@pytest.mark.parametrize("key", ["specserve_tenant", "max_draft_tokens"])
def test_engine_arguments_of_the_token_route_are_checked_too(client: TestClient, key: str) -> None:
    body = {"token_ids": [1], "sampling_params": {"extra_args": {key: "b"}}}
    answer = client.post("/inference/v1/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"sampling_params.extra_args.{key}"


@pytest.mark.parametrize("as_file", [True, False])
def test_controls_of_a_form_are_checked(client: TestClient, as_file: bool) -> None:
    form = {"vllm_xargs": json.dumps(BAD["vllm_xargs"])}
    files = {"file": b"audio"} if as_file else None
    answer = client.post("/v1/audio/transcriptions", data=form, files=files)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "vllm_xargs.max_draft_tokens"


@pytest.mark.parametrize("xargs", ['{"speculation": "off"}', "{", "[1]"])
def test_a_form_with_valid_or_unreadable_controls_is_not_changed(
    client: TestClient, xargs: str
) -> None:
    data = {"vllm_xargs": xargs}
    answer = client.post("/v1/audio/transcriptions", data=data, files={"file": b"audio"})
    assert answer.status_code == 200
    assert xargs.encode() in answer.content


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary=x"])
def test_a_form_that_cannot_be_read_is_left_to_the_application(
    client: TestClient, content_type: str
) -> None:
    headers = {"Content-Type": content_type}
    body = b'--y; name="vllm_xargs"'
    assert client.post("/v1/audio/x", content=body, headers=headers).content == body


@pytest.mark.parametrize(
    "body", [b'{"vllm_xargs": ', b'{"vllm_xargs": ' + b"[" * 100_000, b'"vllm_xargs"', b"\xff\\u00"]
)
def test_a_body_that_cannot_be_read_is_left_to_the_application(
    client: TestClient, body: bytes
) -> None:
    assert client.post("/v1/completions", content=body).content == body


async def answer_controls(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the current controls."""
    await Request(scope, receive).body()
    await Response(json.dumps(dict(CURRENT_CONTROLS.get())))(scope, receive, send)


@pytest.fixture
def controls_client() -> TestClient:
    return TestClient(ControlsMiddleware(answer_controls, ["ngram"]))


def test_the_handler_of_a_call_has_its_controls(controls_client: TestClient) -> None:
    xargs = {"learn": 0, "speculation": "off", "other": 3}
    answer = controls_client.post("/v1/completions", json={"vllm_xargs": xargs})
    assert answer.json() == {"learn": 0, "speculation": "off"}
    assert controls_client.post("/v1/completions", json={"prompt": "vllm_xargs"}).json() == {}


@pytest.mark.parametrize(("xargs", "controls"), [('{"learn": 0}', {"learn": 0}), ("no JSON", {})])
def test_the_handler_of_a_form_has_its_controls(
    controls_client: TestClient, xargs: str, controls: dict[str, int]
) -> None:
    answer = controls_client.post(
        "/v1/audio/transcriptions", data={"vllm_xargs": xargs}, files={"file": b""}
    )
    assert answer.json() == controls


@pytest.mark.parametrize(
    ("pause_s", "num_bytes", "status"), [(31, 1 << 20, 408), (29, 1, 408), (29, 1 << 20, 200)]
)
def test_a_body_that_stops_or_trickles_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, num_bytes: int, status: int
) -> None:
    now_s, num_left, statuses = 0.0, 9, []

    async def receive() -> Message:
        nonlocal now_s, num_left
        now_s, num_left = now_s + pause_s, num_left - 1
        for _ in range(3):  # the loop sees the time
            await asyncio.sleep(0)
        return {"type": "http.request", "body": b" " * num_bytes, "more_body": num_left > 0}

    async def send(message: Message) -> None:
        statuses.append(message.get("status"))

    async def call() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        await ControlsMiddleware(Response(), [])(scope, receive, send)

    asyncio.run(call())
    assert statuses[0] == status


def test_a_disconnect_within_the_body_is_counted_as_a_clients_error() -> None:
    messages: Iterator[Message] = iter(
        [
            {"type": "http.request", "body": b"vllm_xargs", "more_body": True},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Message:
        return next(messages)

    async def fail(*_: object) -> None:
        raise AssertionError("an incomplete body reached the application")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(ControlsMiddleware(fail, [])(scope, receive, send))
    assert sent[0]["status"] == 400
