"""Predicted outputs with OpenAI's client: the same text, and counts of prediction tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.integration.api import MODEL, TIMEOUT_S, Api
from tests.integration.cluster import Deployment

pytestmark = pytest.mark.timeout(900)

CODE = """
def total(values):
    result = 0
    for value in values:
        result = result + value
    return result
"""
QUESTION = f"Repeat this code:\n{CODE * 3}"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 64,
}
ALONE = {"vllm_xargs": {"speculation": "prediction"}}
"""Only the prediction gives drafts."""


@pytest.fixture
def client(api: Api) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{api.base_url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0
    ) as client:
        yield client


def content(text: str | list[str]) -> Any:
    parts = [{"type": "text", "text": each} for each in text] if isinstance(text, list) else text
    return {"type": "content", "content": parts}


def edited(text: str) -> str:
    """The text with a few characters in the middle replaced."""
    middle = len(text) // 2
    return text[: middle - 8] + " otherwise " + text[middle:]


def accepted(api: Api) -> int:
    """Accepted draft tokens of predictions so far."""
    counted = api.speculation()["acceptance"].get("prediction", {})
    return int(counted.get("accepted_tokens", 0))


def ask(client: OpenAI, **options: Any) -> tuple[str, Any]:
    """Text and usage of a chat completion."""
    answer = client.chat.completions.create(**CHAT, **options)
    return answer.choices[0].message.content or "", answer.usage


@pytest.fixture
def plain(client: OpenAI) -> str:
    text, usage = ask(client)
    assert usage.completion_tokens_details is None
    return text


def test_the_text_is_the_same_and_the_usage_counts_prediction_tokens(
    api: Api, client: OpenAI, plain: str
) -> None:
    before = accepted(api)
    text, usage = ask(client, prediction=content(plain), extra_body=ALONE)
    assert text == plain
    counts = usage.completion_tokens_details
    assert counts.accepted_prediction_tokens > 0.9 * usage.completion_tokens
    assert counts.rejected_prediction_tokens < 5
    assert accepted(api) - before > 0.5 * usage.completion_tokens

    text, usage = ask(client, prediction=content(edited(plain)), extra_body=ALONE)
    assert text == plain
    fewer = usage.completion_tokens_details
    assert 0 < fewer.accepted_prediction_tokens < counts.accepted_prediction_tokens
    assert fewer.rejected_prediction_tokens > 0

    text, usage = ask(client, prediction=content("Nothing\tof\tthe\tkind"), extra_body=ALONE)
    assert text == plain
    assert usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_drafts_come_from_the_prediction_that_matches_the_answer(
    api: Api, client: OpenAI, plain: str
) -> None:
    before = accepted(api)
    text, usage = ask(client, prediction=content(["Something else.", plain]), extra_body=ALONE)
    assert text == plain
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert accepted(api) > before


def test_a_stream_has_the_same_text_and_usage(client: OpenAI, plain: str) -> None:
    _, whole = ask(client, prediction=content(edited(plain)))
    stream = client.chat.completions.create(
        **CHAT,
        prediction=content(edited(plain)),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == plain
    assert [each.usage for each in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage == whole


def test_a_completion_takes_predictions_in_vllm_xargs(api: Api, client: OpenAI, plain: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": QUESTION, "temperature": 0, "max_tokens": 64}
    expected = client.completions.create(**body).choices[0].text
    before = accepted(api)
    xargs = {"prediction": ["Something else.", expected], "speculation": "prediction"}
    answer = client.completions.create(**body, extra_body={"vllm_xargs": xargs})
    assert answer.choices[0].text == expected
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert accepted(api) > before


def test_each_of_several_answers_gets_drafts_and_is_counted(client: OpenAI, plain: str) -> None:
    _, one = ask(client, prediction=content(plain))
    sampled = {**CHAT, "temperature": 1.0}
    options: dict[str, Any] = {"n": 2, "top_logprobs": 1, "logprobs": True, "presence_penalty": 0}
    answer = client.chat.completions.create(
        **sampled, **options, prediction=content(plain), extra_body={"top_k": 1}
    )
    assert [each.message.content for each in answer.choices] == [plain, plain]
    assert answer.usage is not None
    counts, of_one = answer.usage.completion_tokens_details, one.completion_tokens_details
    assert counts is not None
    assert counts.accepted_prediction_tokens == 2 * of_one.accepted_prediction_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prediction": {"type": "content", "content": ""}}, "prediction.content"),
        (
            {
                "prediction": {
                    "type": "content",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png,"}}],
                }
            },
            "prediction.content.0.type",
        ),
        ({"prediction": content("word " * 2500)}, "prediction.content"),
        ({"prediction": content("a"), "logit_bias": {"5": 1}}, "logit_bias"),
        ({"prediction": content("a"), "extra_body": {"use_beam_search": True}}, "use_beam_search"),
    ],
)
def test_a_prediction_that_is_not_allowed_is_refused(
    client: OpenAI, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        ask(client, **options)
    assert refused.value.param == param


def test_a_disconnect_ends_the_request_and_frees_its_prediction(
    api: Api, client: OpenAI, shared: Deployment, plain: str
) -> None:
    long = {**CHAT, "max_tokens": 1500}
    stream = client.chat.completions.create(
        **long, prediction=content(plain), stream=True, extra_body={**ALONE, "ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    shared.eventually(
        lambda: api.metric("vllm:num_requests_running") == 0, "the request has ended", 60
    )
    before = accepted(api)
    text, usage = ask(client, extra_body=ALONE)
    assert text == plain
    assert usage.completion_tokens_details is None
    assert accepted(api) == before
