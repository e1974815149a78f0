"""Each of vLLM's features gives the same result with and without speculation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jsonschema
import pytest
from openai import OpenAI

from tests.integration.api import AUTO, MODEL, OFF, REPORT, Api

pytestmark = pytest.mark.timeout(900)

FUNCTION = """
def total(values):
    result = 0
    for value in values:
        result = result + value
    return result
"""
PROMPT = FUNCTION * 6 + "\ndef total(values):\n    result = 0\n"
QUESTION = f"Repeat this code:\n{FUNCTION * 4}"
CHAT = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "array",
    "items": {"enum": ["alpha", "beta", "gamma"]},
    "minItems": 12,
    "maxItems": 12,
}
ONE_CHOICE = {"temperature": 1.0, "top_k": 1}
"""Uses the sampler, but leaves one choice, so that answers can be compared."""

JSON_PROMPT = json.dumps(["alpha", "beta", "gamma"] * 4) + "\n"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "colour",
        "description": "Sets colours.",
        "parameters": {
            "type": "object",
            "properties": {"names": SCHEMA},
            "required": ["names"],
            "additionalProperties": False,
        },
    },
}


class Drafted(NamedTuple):
    """Draft tokens of one request."""

    tokens: int
    accepted: int


def drafted_in(answer: dict[str, Any]) -> Drafted:
    """The drafts that an answer reports. The request must ask for a report."""
    sources = answer["metrics"]["speculative_decoding"]["sources"].values()
    return Drafted(
        sum(each["drafted_tokens"] for each in sources),
        sum(each["accepted_tokens"] for each in sources),
    )


@pytest.fixture
def compare(api: Api) -> Any:
    """Sends a request with speculation off and on, and checks that only the second has drafts."""

    def ask(path: str, **body: Any) -> tuple[dict[str, Any], dict[str, Any], Drafted]:
        off = api.ask(path, **body, vllm_xargs=OFF | REPORT)
        assert drafted_in(off) == (0, 0), "a request without speculation got drafts"
        auto = api.ask(path, **body, vllm_xargs=AUTO | REPORT)
        assert drafted_in(auto).tokens > 0, "no drafts: the comparison shows nothing"
        assert off["usage"]["completion_tokens"] == auto["usage"]["completion_tokens"]
        return off, auto, drafted_in(auto)

    return ask


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"logprobs": 3}, id="logprobs"),
        pytest.param({"echo": True, "logprobs": 1}, id="echo"),
        pytest.param({"prompt_logprobs": 1}, id="prompt logprobs"),
        pytest.param({"repetition_penalty": 1.01}, id="repetition penalty"),
        pytest.param({"presence_penalty": 0.05, "frequency_penalty": 0.02}, id="other penalties"),
        pytest.param({"seed": 3, **ONE_CHOICE}, id="seed"),
        pytest.param({"allowed_token_ids": [300, 301, 302]}, id="allowed tokens"),
        pytest.param({"min_tokens": 60, "stop": ["\n"]}, id="min tokens"),
        pytest.param({"bad_words": ["values"]}, id="bad words"),
        pytest.param({"ignore_eos": True}, id="ignore eos"),
    ],
)
def test_a_completion_is_the_same_with_and_without_speculation(
    compare: Any, options: dict[str, Any]
) -> None:
    off, auto, drafted = compare(
        "/v1/completions", prompt=PROMPT, max_tokens=96, return_token_ids=True, **options
    )
    assert drafted.accepted > 0
    assert_equal(auto["choices"], off["choices"])


def test_several_answers_are_the_same_with_and_without_speculation(api: Api) -> None:
    body = {"prompt": PROMPT, "max_tokens": 96, "n": 2, **ONE_CHOICE}
    off = api.complete(**body, vllm_xargs=OFF)
    before = api.counts()
    auto = api.complete(**body, vllm_xargs=AUTO)
    assert api.counts().since(before).accepted_tokens > 0
    assert len(auto["choices"]) == 2
    assert_equal(auto["choices"], off["choices"])


def test_a_stop_string_ends_the_text_at_the_same_place(api: Api, compare: Any) -> None:
    text = api.complete(prompt=PROMPT, max_tokens=96, vllm_xargs=OFF)["choices"][0]["text"]
    # It begins and ends inside tokens, and comes after the first draft.
    stop = text[len(text) // 2 : len(text) // 2 + 7]
    off, auto, drafted = compare("/v1/completions", prompt=PROMPT, max_tokens=96, stop=[stop])
    choice = auto["choices"][0]
    assert choice == off["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert drafted.accepted > 0


def test_seeded_sampling_is_repeatable_with_and_without_speculation(api: Api) -> None:
    # Speculation uses other random numbers, so the two samples may differ.
    # Another test compares their distributions.
    # With three tokens every pair soon occurs again, which gives drafts.
    body = {"prompt": PROMPT, "max_tokens": 64, "allowed_token_ids": [300, 301, 302]}
    body |= {"temperature": 1.0, "seed": 11, "n": 2}
    for xargs in (OFF, AUTO):
        first = api.complete(**body, vllm_xargs=xargs)["choices"]
        again = api.complete(**body, vllm_xargs=xargs)["choices"]
        assert first == again
        assert first[0]["text"] != first[1]["text"]
    before = api.counts()
    api.complete(**body, vllm_xargs=AUTO)
    assert api.counts().since(before).drafts > 0


def test_an_answer_follows_its_schema(compare: Any) -> None:
    answers = compare(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": f"Repeat this:\n{JSON_PROMPT * 4}"}],
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    )[:2]
    off, auto = (answer["choices"][0]["message"]["content"] for answer in answers)
    assert off == auto
    jsonschema.validate(json.loads(auto), SCHEMA)


def test_a_named_tool_is_called_as_without_speculation(compare: Any) -> None:
    off, auto, drafted = compare(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": f"Repeat this:\n{JSON_PROMPT * 4}"}],
        max_tokens=200,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "colour"}},
    )
    called, expected = (
        [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
        for answer in (auto, off)
    )
    assert called == expected  # the ids of calls are random
    assert called[0]["name"] == "colour"
    assert drafted.accepted > 0


def test_a_chat_answer_is_the_same_with_and_without_speculation(compare: Any) -> None:
    off, auto, drafted = compare(
        "/v1/chat/completions", messages=CHAT, max_tokens=96, logprobs=True, top_logprobs=2
    )
    assert drafted.accepted > 0
    assert_equal(auto["choices"][0], off["choices"][0])


def test_a_stream_gives_the_text_of_a_whole_answer(api: Api) -> None:
    whole = api.complete(prompt=PROMPT, max_tokens=96, vllm_xargs=OFF)["choices"][0]
    with api.streaming(prompt=PROMPT, max_tokens=96, vllm_xargs=AUTO) as events:
        choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    # An accepted draft and the token after it arrive in one event.
    assert len(choices) < 96


def test_requests_of_one_batch_do_not_disturb_one_another(api: Api) -> None:
    prompts = [PROMPT, FUNCTION * 3, JSON_PROMPT * 5, "x = 1\ny = 2\n" * 9]
    alone = [api.complete(prompt=p, max_tokens=64, vllm_xargs=OFF)["choices"][0] for p in prompts]
    together = api.complete(prompt=prompts, max_tokens=64, vllm_xargs=AUTO)["choices"]
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]


def test_a_scoring_call_does_not_change_a_running_answer(api: Api) -> None:
    labels = {"query": FUNCTION, "items": ["return", "pass"], "label_token_ids": [5, 6]}
    body = {"prompt": PROMPT, "max_tokens": 1800, "ignore_eos": True, "logprobs": 3}
    scores = api.ask("/generative_scoring", **labels)["data"]
    whole = api.complete(**body, vllm_xargs=OFF)["choices"][0]
    with ThreadPoolExecutor() as threads, api.streaming(**body, vllm_xargs=AUTO) as events:
        choices = list(next(events)["choices"])
        call = threads.submit(api.ask, "/generative_scoring", **labels)
        written_after_it = 0
        for event in events:
            written_after_it += call.done()
            choices += event["choices"]
    assert written_after_it > 0, "the answer ended before the call"
    assert_equal(call.result()["data"], scores)
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    logprobs = [each for choice in choices for each in choice["logprobs"]["top_logprobs"]]
    assert_equal(logprobs, whole["logprobs"]["top_logprobs"])


def test_a_request_ends_at_the_context_limit_as_without_speculation(api: Api, compare: Any) -> None:
    answer = api.complete(prompt=PROMPT, max_tokens=1, return_token_ids=True)
    prompt = (answer["choices"][0]["prompt_token_ids"] * 20)[:2000]
    off, auto, drafted = compare(
        "/v1/completions", prompt=prompt, max_tokens=48, ignore_eos=True, return_token_ids=True
    )
    assert auto["usage"]["total_tokens"] == 2048
    assert auto["choices"] == off["choices"]
    assert drafted.accepted > 0


@pytest.mark.parametrize(
    "options",
    [
        # Greedy decoding ignores min_p and gets drafts, so this request samples.
        {"min_p": 0.2, "temperature": 0.8, "seed": 7},
        {"logit_bias": {"300": 5.0}},
    ],
)
def test_options_that_speculation_cannot_support_get_no_drafts(
    api: Api, options: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 48, **options}
    auto = api.complete(**body, vllm_xargs=AUTO | REPORT)
    assert drafted_in(auto) == (0, 0)
    assert auto["choices"] == api.complete(**body, vllm_xargs=OFF)["choices"]


@pytest.mark.parametrize("length", [129, 257])
def test_logit_bias_holds_with_a_cached_prompt(api: Api, length: int) -> None:
    ids = api.complete(prompt=PROMPT, max_tokens=1, return_token_ids=True)["choices"][0]
    body = {
        "prompt": (ids["prompt_token_ids"] * 20)[:length],
        "max_tokens": 2,
        "logit_bias": {"300": 100.0},
        "return_token_ids": True,
        "vllm_xargs": AUTO,
    }
    for _ in range(2):
        assert api.complete(**body)["choices"][0]["token_ids"] == [300, 300]


@pytest.mark.parametrize("limit", [0, 2])
def test_drafts_are_no_longer_than_the_request_allows(api: Api, limit: int) -> None:
    whole = api.complete(prompt=PROMPT, max_tokens=96, vllm_xargs=OFF)["choices"]
    before = api.counts()
    xargs = {"max_draft_tokens": limit}
    assert api.complete(prompt=PROMPT, max_tokens=96, vllm_xargs=xargs)["choices"] == whole
    drafted = api.counts().since(before)
    assert drafted.longest_draft == limit
    assert (drafted.drafts > 0) == (limit > 0)


def test_a_source_can_be_selected_by_name(api: Api) -> None:
    xargs = {"speculation": "ngram", "learn": 0, **REPORT}
    answer = api.complete(prompt=PROMPT, max_tokens=32, vllm_xargs=xargs)
    sources = answer["metrics"]["speculative_decoding"]["sources"]
    assert {label for label, each in sources.items() if each["drafted_tokens"]} == {"ngram"}


@pytest.fixture
def openai(api: Api) -> Iterator[OpenAI]:
    """The official client."""
    with OpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_reports_its_drafts_on_request(api: Api) -> None:
    """With and without streaming, in the OpenAI and the generation API, and with a stop string."""
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 48, "vllm_xargs": REPORT}

    def whole(**options: Any) -> Any:
        return api.complete(**asked | options)["metrics"]["speculative_decoding"]

    def streamed() -> Any:
        with api.streaming(**asked, stream_options={"include_usage": True}) as events:
            *others, last = events
        assert not any(event.get("metrics") for event in others)
        return last["metrics"]["speculative_decoding"]

    def generated() -> Any:
        parameters = {"max_new_tokens": 48, "details": True}
        body = {"inputs": PROMPT, "parameters": parameters, "vllm_xargs": asked["vllm_xargs"]}
        return api.ask("/generate", **body)["details"]["speculative_decoding"]

    for report_of in (whole, streamed, generated):
        before = api.counts()
        report, counted = report_of(), api.counts().since(before)
        assert counted.accepted_tokens > 0
        assert report["sources"]["ngram"] == {
            "drafted_tokens": counted.draft_tokens,
            "accepted_tokens": counted.accepted_tokens,
        }
        assert report["num_accepted_draft_tokens"] == counted.accepted_tokens
    answer = api.complete(prompt=PROMPT, max_tokens=48)
    assert answer["metrics"] is None
    text = answer["choices"][0]["text"]
    report = whole(stop=text[len(text) // 2 :], max_tokens=96)
    assert report["sources"]["ngram"]["drafted_tokens"] == report["num_draft_tokens"] > 0
    assert whole(logit_bias={"300": 1.0})["num_draft_tokens"] == 0


def test_the_openai_client_streams_a_completion(api: Api, openai: OpenAI) -> None:
    stream = openai.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=48, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == api.complete(prompt=PROMPT, max_tokens=48)["choices"][0]["text"]


def test_the_openai_client_streams_a_chat_completion(api: Api, openai: OpenAI) -> None:
    stream = openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=48,
        temperature=0,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    whole = api.chat(messages=CHAT, max_tokens=48)["choices"][0]["message"]["content"]
    assert text == whole


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    """Asserts equal JSON values. Floats are log-probabilities and may differ by 1e-4."""
    if isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, abs=1e-4), path
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{path}.{index}")
    else:
        assert one == other, path
