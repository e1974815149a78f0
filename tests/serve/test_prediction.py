"""Predictions of calls: accepted and refused forms."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from specserve.engine.prediction import Predictor
from specserve.engine.tenants import CURRENT_CONTROLS
from specserve.serve.controls import ControlsMiddleware

MAX_TOKENS = 8


class Characters:
    """A tokenizer whose tokens are characters."""

    max_chars_per_token = 4

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(each) for each in text]


PREDICTOR = Predictor(Characters(), MAX_TOKENS)


def client_of(app: Any) -> TestClient:
    return TestClient(ControlsMiddleware(app, ["ngram", "prediction"], PREDICTOR))


async def echo_ids(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the tokens that the engine will get."""
    await Request(scope, receive).body()
    tokens = CURRENT_CONTROLS.get().get("prediction", b"")
    assert isinstance(tokens, bytes)
    await JSONResponse(np.frombuffer(tokens, np.int32).tolist())(scope, receive, send)


@pytest.fixture
def client() -> TestClient:
    return client_of(echo_ids)


def content(value: object) -> dict[str, object]:
    return {"prediction": {"type": "content", "content": value}}


def part(text: object) -> dict[str, object]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/chat/completions", content("abc"), "abc"),
        ("/v1/chat/completions", content([part("ab"), part("c")]), "abc"),
        ("/v1/chat/completions", {"prediction": None}, ""),
        ("/v1/chat/completions", {"messages": [{"content": '"prediction"'}]}, ""),
        ("/v1/completions", {"vllm_xargs": {"prediction": "abc"}}, "abc"),
        ("/v1/completions", {"vllm_xargs": {"prediction": ["ab", "c"]}}, "abc"),
        ("/v1/completions", {"vllm_xargs": {"learn": 0}}, ""),
        ("/inference/v1/generate", {"sampling_params": {"extra_args": {"prediction": "a"}}}, "a"),
        ("/generate", {"inputs": "x", "vllm_xargs": {"prediction": ["ab", "c"]}}, "abc"),
        ("/v1/chat/completions", content("a") | {"vllm_xargs": {"prediction": "b"}}, "ab"),
        ("/v1/chat/completions", content("a") | {"n": 2, "logprobs": True, "tools": []}, "a"),
        ("/v1/chat/completions", content("a") | {"min_p": 0, "logit_bias": None}, "a"),
    ],
)
def test_the_engine_gets_the_tokens(
    client: TestClient, path: str, body: dict[str, Any], text: str
) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()) == (200, [ord(each) for each in text])


def test_a_prediction_in_a_form_is_accepted(client: TestClient) -> None:
    form = {"vllm_xargs": json.dumps({"prediction": "ab"})}
    answer = client.post("/v1/audio/transcriptions", data=form, files={"file": b""})
    assert answer.json() == [97, 98]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prediction": "abc"}, "prediction", "'abc' is not allowed"),
        ({"prediction": {}}, "prediction.type", 'None is not allowed; allowed: "content"'),
        ({"prediction": {"type": "text"}}, "prediction.type", "'text'"),
        ({"prediction": {"type": "content"}}, "prediction.content", "None"),
        (content(""), "prediction.content", "a text that is not empty"),
        (content(7), "prediction.content", "7 is not allowed"),
        (content([]), "prediction.content", "at least one part"),
        (content(["a"]), "prediction.content.0", "'a' is not allowed"),
        (content([part("a"), part("")]), "prediction.content.1.text", "not empty"),
        (
            content([part("a"), {"type": "image_url", "image_url": {"url": "data:,"}}]),
            "prediction.content.1.type",
            "'image_url' is not allowed; allowed: \"text\"",
        ),
        (content("\ud800"), "prediction.content", "whole Unicode characters"),
        (content("x" * 9), "prediction.content", "'9 tokens' is not allowed; allowed: at most 8"),
        (content("x" * 33), "prediction.content", "'33 characters' is not allowed"),
        (content([part("x")] * 9), "prediction.content.0.text", "'9 parts' is not allowed"),
        ({"vllm_xargs": {"prediction": ["x"] * 9}}, "vllm_xargs.prediction.0", "'9 parts'"),
        ({"vllm_xargs": {"prediction": ""}}, "vllm_xargs.prediction", "not empty"),
        ({"vllm_xargs": {"prediction": 3}}, "vllm_xargs.prediction", "a list of such texts"),
        ({"vllm_xargs": {"prediction": []}}, "vllm_xargs.prediction", "a list of such texts"),
        ({"vllm_xargs": {"prediction": ["a", 3]}}, "vllm_xargs.prediction.1", "3 is not allowed"),
        (content("a") | {"use_beam_search": True}, "use_beam_search", "with 'prediction'"),
        (content("a") | {"min_p": 0.1}, "min_p", "with 'prediction'"),
        (content("a") | {"logit_bias": {"5": 1}}, "logit_bias", "with 'prediction'"),
        (content("a") | {"thinking_token_budget": 9}, "thinking_token_budget", "'prediction'"),
        (content("a") | {"thinking_token_budget": 0}, "thinking_token_budget", "'prediction'"),
        (
            {"sampling_params": {"extra_args": {"prediction": "a"}, "min_p": 0.1}},
            "sampling_params.min_p",
            "with 'prediction'",
        ),
    ],
)
def test_an_invalid_prediction_gets_400_with_field_value_and_limit(
    client: TestClient, body: dict[str, Any], param: str, words: str
) -> None:
    answer = client.post("/v1/chat/completions", content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, 400, param)
    assert error["message"].startswith(f"{param}: ")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"vllm_xargs": {"prediction": 3}}, "vllm_xargs.prediction: 3 is not allowed"),
        (
            {"parameters": {"typical_p": 0.5}, "vllm_xargs": {"prediction": "a"}},
            "parameters.typical_p: 0.5 is not allowed",
        ),
        (
            {"parameters": {"watermark": True}, "vllm_xargs": {"prediction": "a"}},
            "parameters.watermark: True is not allowed",
        ),
    ],
)
def test_a_refusal_of_the_generation_api_has_its_own_form(
    client: TestClient, body: dict[str, Any], message: str
) -> None:
    answer = client.post("/generate", json={"inputs": "x", **body})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(f"Input validation error: {message}")


@pytest.mark.parametrize("body", [content("abc"), {"vllm_xargs": {"prediction": "abc"}}])
def test_an_application_without_the_source_refuses_predictions(body: dict[str, Any]) -> None:
    answer = TestClient(ControlsMiddleware(echo_ids, ["ngram"])).post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "no source `prediction`" in answer.json()["error"]["message"]
