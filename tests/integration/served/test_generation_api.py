"""The generation API with the clients of its users: huggingface_hub and curl."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import torch
from huggingface_hub import (
    ChatCompletionInputJSONSchema,
    ChatCompletionInputResponseFormatJSONSchema,
    InferenceClient,
    TextGenerationInputGrammarType,
)
from huggingface_hub.errors import HfHubHTTPError, ValidationError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    WatermarkDetector,
    WatermarkingConfig,
)

from tests.integration.api import AUTO, OFF, Api
from tests.integration.applications import KEYS, MAX_NUM_SEQS, MAX_QUEUED
from tests.integration.cluster import Deployment, model_path
from tests.integration.running import GENERATED

pytestmark = pytest.mark.timeout(900)

FUNCTION = """
def total(values):
    result = 0
    for value in values:
        result = result + value
    return result
"""
PROMPT = FUNCTION * 6 + "\ndef total(values):\n    result = 0\n"
NUM_TOKENS = 64

CURL_BODY: dict[str, Any] = {
    "inputs": PROMPT,
    "parameters": {
        **{"best_of": 1, "decoder_input_details": True, "details": True, "do_sample": True},
        **{"max_new_tokens": 20, "repetition_penalty": 1.03, "return_full_text": False},
        **{"seed": None, "temperature": 0.5, "top_k": 10, "top_n_tokens": 5, "top_p": 0.95},
        **{"truncate": None, "typical_p": 0.5, "watermark": True},
    },
    "stream": False,
}
"""The example of Text Generation Inference, with every parameter."""


@pytest.fixture
def client(api: Api) -> Any:  # its overloads do not accept ** of a dictionary
    """The official client, which posts to ``/``."""
    return InferenceClient(model=api.base_url)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("demo-draft"))


def generate(api: Api, path: str = "/generate", **body: Any) -> Any:
    answer = api.http.post(path, json={"inputs": PROMPT, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(api: Api, **body: Any) -> list[dict[str, Any]]:
    answer = api.http.post("/generate_stream", json={"inputs": PROMPT, **body})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.split("\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def completed(api: Api, **options: Any) -> dict[str, Any]:
    """The answer of ``/v1/completions`` to the same prompt."""
    choice: dict[str, Any] = api.complete(
        prompt=PROMPT, max_tokens=NUM_TOKENS, vllm_xargs=OFF, **options
    )["choices"][0]
    return choice


def test_the_official_client_gets_the_text_of_the_completion(api: Api, client: Any) -> None:
    text = completed(api)["text"]
    asked = {"max_new_tokens": NUM_TOKENS, "return_full_text": False}
    assert client.text_generation(PROMPT, **asked) == text
    assert client.text_generation(PROMPT, max_new_tokens=NUM_TOKENS) == PROMPT + text


def test_the_official_client_gets_details(api: Api, client: Any, tokenizer: Any) -> None:
    expected = completed(api, logprobs=2, return_token_ids=True)
    answer = client.text_generation(
        PROMPT,
        details=True,
        decoder_input_details=True,
        max_new_tokens=NUM_TOKENS,
        return_full_text=False,
        top_n_tokens=2,
    )
    details = answer.details
    assert details is not None
    assert answer.generated_text == expected["text"]
    assert (details.finish_reason, details.generated_tokens) == ("length", NUM_TOKENS)
    assert [token.id for token in details.tokens] == expected["token_ids"]
    assert "".join(token.text for token in details.tokens) == expected["text"]
    logprobs = expected["logprobs"]
    assert [token.logprob for token in details.tokens] == pytest.approx(
        logprobs["token_logprobs"], abs=1e-4
    )
    assert details.top_tokens is not None
    for top, likely in zip(details.top_tokens, logprobs["top_logprobs"], strict=True):
        # The client does not parse lists of lists.
        result = {token["text"]: token["logprob"] for token in top}
        assert result == pytest.approx(likely, abs=1e-4)
    assert [token.id for token in details.prefill] == tokenizer.encode(PROMPT)
    assert details.prefill[0].logprob is None
    assert all(token.logprob < 0 for token in details.prefill[1:])


def test_the_official_client_streams_one_event_per_token_despite_drafts(
    api: Api, client: Any
) -> None:
    expected = completed(api, return_token_ids=True)
    before = api.counts()
    stream = client.text_generation(
        PROMPT, stream=True, details=True, max_new_tokens=NUM_TOKENS, return_full_text=False
    )
    result = list(stream)
    assert api.counts().since(before).accepted_tokens > 0
    assert [each.index for each in result] == list(range(1, NUM_TOKENS + 1))
    assert [each.token.id for each in result] == expected["token_ids"]
    assert "".join(each.token.text for each in result) == expected["text"]
    assert {each.generated_text for each in result[:-1]} == {None}
    assert result[-1].generated_text == expected["text"]
    assert result[-1].details is not None
    assert result[-1].details.generated_tokens == NUM_TOKENS
    pieces = client.text_generation(PROMPT, stream=True, max_new_tokens=NUM_TOKENS)
    assert "".join(pieces) == expected["text"]


@pytest.mark.parametrize("stream", [True, False])
def test_the_official_client_raises_its_own_errors(client: Any, stream: bool) -> None:
    with pytest.raises(ValidationError, match=r"`top_p` must be > 0.0 and < 1.0. Given: 1.5"):
        list(client.text_generation(PROMPT, top_p=1.5, stream=stream))


def test_the_official_client_gets_text_in_its_grammar(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    grammar = TextGenerationInputGrammarType(type="json", value=schema)
    text = client.text_generation(
        PROMPT, grammar=grammar, max_new_tokens=40, return_full_text=False
    )
    jsonschema.validate(json.loads(text), schema)


def test_curl_gets_an_answer_to_the_official_example(api: Api) -> None:
    answer = subprocess.run(
        [
            *("curl", "--silent", "--show-error", "--fail-with-body", f"{api.base_url}/generate"),
            *("-H", "Content-Type: application/json", "-d", json.dumps(CURL_BODY)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    result = json.loads(answer.stdout)
    details = result["details"]
    assert details["generated_tokens"] == len(details["tokens"]) == len(details["top_tokens"])
    assert all(len(top) == 5 for top in details["top_tokens"])
    assert len(details["prefill"]) == details["prompt_tokens"]
    assert details["seed"] is not None
    again = CURL_BODY | {"parameters": {**CURL_BODY["parameters"], "seed": details["seed"]}}
    assert generate(api, **again)["generated_text"] == result["generated_text"]


def test_a_stop_string_ends_the_text_and_is_part_of_it(api: Api) -> None:
    text = completed(api)["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 7]
    parameters = {"stop": [stop], "details": True, "max_new_tokens": NUM_TOKENS}
    before = api.counts()
    result = events(api, parameters=parameters)
    assert api.counts().since(before).accepted_tokens > 0
    assert result[-1]["generated_text"] == text[: text.index(stop) + len(stop)]
    assert result[-1]["details"]["finish_reason"] == "stop_sequence"
    whole = generate(api, parameters=parameters)
    assert whole["generated_text"] == result[-1]["generated_text"]
    assert [each["token"] for each in result] == [
        pytest.approx(token, abs=1e-4) for token in whole["details"]["tokens"]
    ]


def test_the_best_of_two_has_the_higher_mean_log_probability(api: Api) -> None:
    def mean(sequence: dict[str, Any]) -> float:
        logprobs: list[float] = [token["logprob"] for token in sequence["tokens"]]
        return sum(logprobs) / len(logprobs)

    parameters = {"best_of": 2, "do_sample": True, "details": True, "max_new_tokens": 16}
    for _ in range(8):  # an unsorted pair is right half of the time
        details = generate(api, parameters=parameters)["details"]
        (other,) = details["best_of_sequences"]
        assert mean(details) >= mean(other)
        assert None not in (details["seed"], other["seed"])
        assert details["seed"] != other["seed"]


def test_truncate_keeps_the_last_prompt_tokens(api: Api, tokenizer: Any) -> None:
    parameters = {"truncate": 9, "decoder_input_details": True, "max_new_tokens": 2}
    details = generate(api, parameters=parameters)["details"]
    assert [token["id"] for token in details["prefill"]] == tokenizer.encode(PROMPT)[-9:]
    assert details["prompt_tokens"] == 9


@pytest.mark.parametrize(
    "parameters",
    [
        {"typical_p": 0.7, "seed": 5},
        {"typical_p": 0.7, "top_k": 10, "top_p": 0.9, "temperature": 0.8, "seed": 5},
        {"watermark": True},
        {"watermark": True, "do_sample": True, "seed": 5},
    ],
)
def test_parameters_that_speculation_cannot_support_get_no_drafts(
    api: Api, parameters: dict[str, Any]
) -> None:
    before = api.counts()
    texts = [
        generate(api, parameters={"max_new_tokens": 48, **parameters}, vllm_xargs=xargs)
        for xargs in (AUTO, OFF)
    ]
    assert api.counts() == before
    assert texts[0] == texts[1]


def test_typical_decoding_agrees_with_transformers(api: Api, tokenizer: Any) -> None:
    # With such a small value only one token is left.
    parameters = {"typical_p": 0.001, "max_new_tokens": 24, "details": True}
    details = generate(api, parameters=parameters)["details"]
    model = AutoModelForCausalLM.from_pretrained(model_path("demo-draft"), dtype=torch.float32)
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    options = {"do_sample": True, "typical_p": 0.001, "top_k": 0, "max_new_tokens": 24}
    expected = model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()
    assert [token["id"] for token in details["tokens"]] == expected
    assert completed(api, return_token_ids=True)["token_ids"][:24] != expected


def test_the_watermark_is_found_by_transformers_detector(api: Api) -> None:
    config = AutoConfig.from_pretrained(model_path("demo-draft"))
    detector = WatermarkDetector(config, "cpu", WatermarkingConfig(greenlist_ratio=0.5, bias=2.0))

    def share(*, watermark: bool) -> float:
        parameters = {"do_sample": True, "temperature": 1.5, "seed": 3, "max_new_tokens": 200}
        parameters |= {"details": True, "watermark": watermark}
        # After this prompt the model has several likely tokens at each position.
        result = generate(api, inputs="Once upon a time", parameters=parameters)
        tokens = torch.tensor([[token["id"] for token in result["details"]["tokens"]]])
        return float(detector(tokens, return_dict=True).green_fraction[0])

    assert share(watermark=True) > 0.65
    assert share(watermark=False) < 0.6


def test_a_wrong_control_gives_an_error_in_this_apis_form(api: Api) -> None:
    body = {"inputs": PROMPT, "vllm_xargs": {"speculation": "fast"}}
    for path in ("/generate", "/generate_stream", "/"):
        answer = api.http.post(path, json=body)
        assert answer.status_code == 422
        assert answer.json()["error_type"] == "validation"
        assert "'fast' is not allowed; allowed: auto, off, ngram" in answer.json()["error"]


def test_controls_apply_in_this_api_too(api: Api) -> None:
    parameters = {"max_new_tokens": NUM_TOKENS}
    before = api.counts()
    generate(api, parameters=parameters, vllm_xargs=OFF)
    assert api.counts() == before
    generate(api, parameters=parameters, vllm_xargs={"max_draft_tokens": 2})
    assert api.counts().since(before).longest_draft == 2


def test_a_prediction_gives_drafts_in_this_api_too(api: Api) -> None:
    def accepted() -> int:
        counted = api.speculation()["acceptance"].get("prediction", {})
        return int(counted.get("accepted_tokens", 0))

    text = completed(api)["text"]
    xargs = {"prediction": text, "speculation": "prediction"}
    before = accepted()
    for stream in (False, True):
        parameters = {"max_new_tokens": NUM_TOKENS}
        if stream:
            result = events(api, parameters=parameters, vllm_xargs=xargs)[-1]
        else:
            result = generate(api, parameters=parameters, vllm_xargs=xargs)
        assert result["generated_text"] == text
        assert accepted() - before > NUM_TOKENS / 2
        before = accepted()
    both = {"inputs": PROMPT, "parameters": {"typical_p": 0.5}, "vllm_xargs": xargs}
    assert api.http.post("/generate", json=both).status_code == 422


def test_excess_requests_get_429_in_this_apis_form(shared: Deployment) -> None:
    many = 3 * (MAX_NUM_SEQS + MAX_QUEUED)
    headers = {"Authorization": f"Bearer {next(iter(KEYS.values()))}"}
    api = Api(shared.base_url("/team"))
    body = GENERATED | {"parameters": {"max_new_tokens": 300, "repetition_penalty": 0.5}}
    with api.http, ThreadPoolExecutor(many) as pool:
        burst = [
            pool.submit(api.http.post, "/generate", json=body, headers=headers) for _ in range(many)
        ]
        answers = [request.result() for request in burst]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in refused:
        assert answer.headers["Retry-After"] == "3"
        assert answer.json() == {"error": "Model is overloaded", "error_type": "overloaded"}


def test_the_official_client_needs_a_valid_key(shared: Deployment) -> None:
    url = shared.base_url("/team")
    key = next(iter(KEYS.values()))
    text = InferenceClient(model=url, token=key).text_generation("x = ", max_new_tokens=4)
    assert text.startswith("x = ")
    with pytest.raises(HfHubHTTPError, match="401"):
        InferenceClient(model=url, token="sk-no").text_generation("x = ", max_new_tokens=4)


def test_hugging_faces_client_gets_a_chat_answer_in_its_schema(
    client: InferenceClient,
) -> None:
    schema: dict[str, object] = {
        "type": "object",
        "properties": {"mood": {"enum": ["calm"]}},
        "required": ["mood"],
    }
    answer = client.chat_completion(
        [{"role": "user", "content": "How are you?"}],
        model="demo",
        max_tokens=32,
        response_format=ChatCompletionInputResponseFormatJSONSchema(
            type="json_schema",
            json_schema=ChatCompletionInputJSONSchema(name="x", schema=schema),
        ),
    )
    assert json.loads(answer.choices[0].message.content or "") == {"mood": "calm"}


def test_info_gives_the_limits(api: Api) -> None:
    info = api.http.get("/info").json()
    assert info["model_id"] == "demo"
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (2047, 2048)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
def test_the_api_can_be_switched_off(shared: Deployment, path: str) -> None:
    with Api(shared.base_url("/drafter")).http as http:
        assert http.post(path, json={"inputs": "a"}).status_code == 404


@pytest.fixture
def asked_in_a_batch(api: Api) -> Iterator[Callable[..., list[Any]]]:
    with ThreadPoolExecutor(8) as pool:

        def ask(*bodies: dict[str, Any]) -> list[Any]:
            return list(pool.map(lambda body: generate(api, **body), bodies))

        yield ask


def test_logits_processors_do_not_change_other_requests(
    api: Api, asked_in_a_batch: Callable[..., list[Any]]
) -> None:
    marked = {"parameters": {"watermark": True, "max_new_tokens": NUM_TOKENS}}
    typical = {"parameters": {"typical_p": 0.3, "seed": 1, "max_new_tokens": NUM_TOKENS}}
    plain = {"parameters": {"max_new_tokens": NUM_TOKENS}}
    alone = [generate(api, **body) for body in (marked, typical, plain)]
    before = api.counts()
    assert asked_in_a_batch(marked, typical, plain, plain, marked, typical, plain) == [
        *alone,
        alone[2],
        *alone,
    ]
    assert api.counts().since(before).accepted_tokens > 0
