from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.integration.api import Api
from tests.integration.cluster import HOST, Deployment

pytestmark = pytest.mark.timeout(900)

PROMPT = "def f(x):\n    return x\n" * 4


@pytest.fixture(autouse=True)
def _the_server_goes_on(api: Api) -> Any:
    yield
    assert (
        api.complete(prompt=PROMPT, max_tokens=4, ignore_eos=True)["usage"]["completion_tokens"]
        == 4
    )


def error_of(api: Api, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """The error object of a 400 answer. Checks that it has OpenAI's form."""
    response = api.http.post(path, json={"model": "demo", "prompt": PROMPT, "max_tokens": 4} | body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == 400
    return error


@pytest.mark.parametrize(
    ("xargs", "param", "message"),
    [
        (
            {"speculation": "fast"},
            "speculation",
            "'fast' is not allowed; allowed: auto, off, ngram",
        ),
        ({"speculation": 1}, "speculation", "1 is not allowed; allowed: auto, off, ngram"),
        ({"max_draft_tokens": -1}, "max_draft_tokens", "-1 is not allowed; allowed: an integer 0"),
        (
            {"max_draft_tokens": 129},
            "max_draft_tokens",
            "129 is not allowed; allowed: an integer 0",
        ),
        (
            {"max_draft_tokens": "x"},
            "max_draft_tokens",
            "'x' is not allowed; allowed: an integer 0",
        ),
        ({"learn": 2}, "learn", "2 is not allowed; allowed: 0 or 1"),
        ({"report": "yes"}, "report", "'yes' is not allowed; allowed: 0 or 1"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_wrong_control_is_refused_with_its_field_and_allowed_values(
    api: Api, path: str, xargs: dict[str, Any], param: str, message: str
) -> None:
    body: dict[str, Any] = {"vllm_xargs": xargs}
    if "chat" in path:
        body |= {"messages": [{"role": "user", "content": "hello"}]}
    error = error_of(api, body, path)
    assert error["param"] == f"vllm_xargs.{param}"
    assert error["message"].startswith(f"vllm_xargs.{param}: {message}")


def test_a_json_key_with_escapes_is_checked_too(api: Api) -> None:
    body = '{"model": "demo", "prompt": "x", "vllm\\u005fxargs": {"speculation": "fast"}}'
    response = api.http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "vllm_xargs.speculation"


def test_a_prompt_over_the_context_length_is_refused_with_the_length(api: Api) -> None:
    assert "2048" in error_of(api, {"prompt": "x = 1\n" * 3000})["message"]


def test_an_empty_prompt_is_refused(api: Api) -> None:
    assert "empty" in error_of(api, {"prompt": ""})["message"]


@pytest.mark.parametrize("body", ['{"model": "demo", "prompt": ', "", "[]", "\x00", '"vllm_xargs"'])
def test_a_body_that_is_no_json_object_is_refused(api: Api, body: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = api.http.post("/v1/completions", content=body, headers=headers)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["message"]


def test_the_model_answers_to_each_of_its_names(api: Api) -> None:
    listed = api.http.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["demo", "default"]
    answer = api.complete(model="default", prompt="import os", max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_an_unknown_model_is_not_found(api: Api) -> None:
    response = api.http.post("/v1/completions", json={"model": "other", "prompt": PROMPT})
    assert response.status_code == 404
    assert "other" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("DELETE", "/v1/speculation", 405), ("GET", "/v1/x", 404)],
)
def test_a_wrong_method_or_path_is_an_error_in_openais_form(
    api: Api, method: str, path: str, status: int
) -> None:
    response = api.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions", "/tokenize"])
def test_a_body_that_is_nested_too_deeply_is_refused(api: Api, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = api.http.post(path, content=b"[" * 100_000, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/completions", {"prompt": PROMPT, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/responses", {"input": PROMPT}),
    ],
)
def test_a_schema_with_a_number_beyond_64_bits_is_refused(
    api: Api, path: str, body: dict[str, Any]
) -> None:
    schema = {"structured_outputs": {"json": {"minimum": -(2**63) - 1}}}
    response = api.http.post(path, json={"model": "demo"} | body | schema)
    assert "ints < -2**63" in response.text
    assert "stream" in body or response.status_code == 400


def test_a_refused_streamed_response_ends_with_an_error(api: Api) -> None:
    body = {"model": "demo", "input": PROMPT, "stream": True, "stop_token_ids": [-1]}
    response = api.http.post("/v1/responses", json=body)
    *_, name, data = response.text.strip().splitlines()
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["code"], error["param"]) == ("BadRequestError", "stop_token_ids")


def test_a_request_cannot_scale_the_engine(api: Api) -> None:
    response = api.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
    assert response.status_code == 501
    assert response.json()["error"]["code"] == 501


def test_the_server_listens_on_loopback_only(shared: Deployment) -> None:
    found = []
    for process in shared.cluster.processes():
        with suppress(psutil.NoSuchProcess):
            found += process.net_connections(kind="tcp")
    listening = {
        connection.laddr.ip
        for connection in found
        if connection.status == "LISTEN" and connection.laddr.port == shared.port
    }
    assert listening == {HOST}
