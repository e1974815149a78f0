"""Texts from vLLM's own renderer, output processor and detokenizer, without a model."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from specserve.core.errors import GenerationError
from specserve.engine.text_generator import TextGenerator
from specserve.engine.text_request import Asked, GenerateBody, Output, Parameters
from tests.engine.scripted_client import MAX_MODEL_LEN, MODELS, ScriptedClient

PROMPT = "def f(x):"
TEXT = "日本 é🎉"
"""Each character except the space has several tokens."""
END = 1


@pytest.fixture(scope="module")
def only_client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def client(only_client: ScriptedClient) -> ScriptedClient:
    only_client.raises, only_client.ends_with = None, FinishReason.LENGTH
    return only_client


def call(**headers: str) -> Request:
    names = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return Request({"type": "http", "headers": list(names.items())})


def generate(client: ScriptedClient, **fields: Any) -> list[Output]:
    """All outputs for a request's parameters; other arguments may be given too."""
    generator = TextGenerator(
        client,
        fields.pop("models", MODELS),
        None,
        6,
        has_processors=fields.pop("has_processors", True),
    )
    by, streams = fields.pop("call", call()), fields.pop("streams", False)
    inputs, arguments = fields.pop("inputs", PROMPT), fields.pop("vllm_xargs", None)
    given = Parameters(**fields)
    body = GenerateBody(inputs=inputs, vllm_xargs=arguments)

    async def run() -> list[Output]:
        return [
            each
            async for each in generator.generate(Asked(body, given, streams, seed=given.seed), by)
        ]

    return asyncio.run(run())


def refused(client: ScriptedClient, **fields: Any) -> GenerationError:
    with pytest.raises(GenerationError) as refusal:
        generate(client, **fields)
    return refusal.value


def ids_of(client: ScriptedClient, text: str) -> list[int]:
    ids: list[int] = client.tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("size", [1, 3, 100])
def test_each_token_has_the_characters_that_it_completes(client: ScriptedClient, size: int) -> None:
    ids = ids_of(client, TEXT)
    assert len(ids) > len(TEXT)
    client.steps = [ids[at : at + size] for at in range(0, len(ids), size)]
    outputs = generate(client, streams=True)
    tokens = [token for each in outputs for token in each.continuations[0].tokens]
    assert [token.id for token in tokens] == ids
    assert "".join(token.text for token in tokens) == TEXT
    assert all("�" not in token.text for token in tokens)
    assert "".join(each.continuations[0].text for each in outputs) == TEXT
    assert [each.continuations[0].finish_reason for each in outputs][-1] == "length"


def test_a_whole_answer_has_the_content_of_the_stream(client: ScriptedClient) -> None:
    ids = ids_of(client, TEXT)
    client.steps = [ids[:2], ids[2:]]
    (whole,) = generate(client, details=True)
    streamed = generate(client, streams=True)
    assert whole.continuations[0].tokens == sum(
        (each.continuations[0].tokens for each in streamed), ()
    )
    assert whole.continuations[0].text == TEXT
    assert whole.num_prompt_tokens == len(client.prompt)


def test_a_text_goes_on_where_the_prompt_ends_within_a_character(client: ScriptedClient) -> None:
    ids = ids_of(client, "本")
    client.steps = [ids]
    prompt = ids_of(client, PROMPT)
    (output,) = generate(client, details=True, inputs=PROMPT)
    assert client.prompt[1:] == prompt
    assert [token.text for token in output.continuations[0].tokens][-1] == "本"


def test_the_end_token_is_special_and_not_in_the_text(client: ScriptedClient) -> None:
    client.steps, client.ends_with = [[*ids_of(client, " a"), END]], FinishReason.STOP
    (output,) = generate(client, details=True)
    (continuation,) = output.continuations
    assert continuation.text == " a"
    last = continuation.tokens[-1]
    assert (last.id, last.text, last.special) == (END, "<|end|>", True)
    assert (continuation.finish_reason, continuation.num_tokens) == ("eos_token", 2)


@pytest.mark.parametrize("streams", [True, False])
def test_a_stop_string_ends_the_text_within_a_step_and_stays_in_it(
    client: ScriptedClient, streams: bool
) -> None:
    ids = ids_of(client, "x = 1\ny = 2\nz = 3")
    client.steps = [ids]
    (output,) = generate(client, stop="y =", details=True, streams=streams)
    (continuation,) = output.continuations
    assert continuation.text == "x = 1\ny ="
    assert "".join(token.text for token in continuation.tokens) == "x = 1\ny ="
    assert continuation.num_tokens == len(continuation.tokens) < len(ids)
    assert continuation.finish_reason == "stop_sequence"


def test_the_top_tokens_are_the_most_likely_ones_in_order(
    client: ScriptedClient,
) -> None:
    client.steps = [[400], [300]]
    (output,) = generate(client, details=True, top_n_tokens=2)
    (continuation,) = output.continuations
    assert [[token.id for token in top] for top in continuation.top_tokens] == [[300, 301]] * 2
    assert [token.logprob for token in continuation.tokens] == [-1.5, -1.0]


def test_prompt_tokens_have_their_log_probabilities(client: ScriptedClient) -> None:
    client.steps = [[400]]
    (output,) = generate(client, decoder_input_details=True)
    first, *others = output.prompt_tokens
    assert (first.id, first.text, first.logprob) == (0, "<|begin|>", None)
    assert "".join(token.text for token in others) == PROMPT
    assert [token.logprob for token in others] == [-token.id / 64 for token in others]


def test_several_continuations_come_with_their_mean_log_probability(
    client: ScriptedClient,
) -> None:
    client.steps = [[400, 401], [402]]
    (output,) = generate(client, best_of=2, do_sample=True)
    assert [each.mean_logprob for each in output.continuations] == [-1.5, -2.5]
    assert [each.num_tokens for each in output.continuations] == [3, 3]


def test_a_truncated_prompt_keeps_its_last_tokens(client: ScriptedClient) -> None:
    client.steps = [[400]]
    (output,) = generate(client, truncate=3)
    assert client.prompt == ids_of(client, PROMPT)[-3:]
    assert output.num_prompt_tokens == 3


def test_a_request_fills_the_context_by_default_and_cannot_exceed_it(
    client: ScriptedClient,
) -> None:
    client.steps = [[400]]
    generate(client)
    rest = MAX_MODEL_LEN - len(client.prompt)
    assert client.params.max_tokens == rest
    generate(client, max_new_tokens=rest)
    message = str(refused(client, max_new_tokens=rest + 1))
    assert message == (
        f"Input validation error: `inputs` tokens + `max_new_tokens` must be <= {MAX_MODEL_LEN}. "
        f"Given: {len(client.prompt)} `inputs` tokens and {rest + 1} `max_new_tokens`"
    )


@pytest.mark.parametrize("num_words", [MAX_MODEL_LEN, 10 * MAX_MODEL_LEN, 10**6])
def test_a_prompt_over_the_context_is_refused_with_limit_and_length(
    client: ScriptedClient, num_words: int
) -> None:
    message = str(refused(client, inputs="f " * num_words))
    rule = f"`inputs` must have less than {MAX_MODEL_LEN} tokens. Given: "
    assert message.startswith(f"Input validation error: {rule}")


def test_a_prompt_that_fills_the_context_has_no_room_for_a_token(client: ScriptedClient) -> None:
    ids = ids_of(client, "f" + " f" * (MAX_MODEL_LEN - 2))
    assert len(ids) + 1 == MAX_MODEL_LEN
    message = str(refused(client, inputs=client.tokenizer.decode(ids)))
    assert f"less than {MAX_MODEL_LEN} tokens. Given: {MAX_MODEL_LEN}" in message


def test_sampling_parameters_reach_vllm(client: ScriptedClient) -> None:
    client.steps = [[400]]
    generate(
        client,
        temperature=0.5,
        top_k=10,
        top_p=0.95,
        repetition_penalty=1.03,
        frequency_penalty=-0.5,
        seed=2**64 - 1,
        grammar={"type": "regex", "value": "[a-z]+"},
    )
    params = client.params
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 10, 0.95)
    assert (params.repetition_penalty, params.frequency_penalty) == (1.03, -0.5)
    assert (params.seed, params.structured_outputs.regex) == (2**63 - 1, "[a-z]+")
    assert params.extra_args is None


def test_the_callers_further_arguments_reach_the_engine(client: ScriptedClient) -> None:
    client.steps = [[400]]
    given = {"a_processor": [1, 2]}
    generate(client, vllm_xargs=given)
    assert client.params.extra_args == given
    generate(client, vllm_xargs=given, watermark=True)
    assert client.params.extra_args == {**given, "specserve_watermark": True}


def test_headers_set_id_and_priority_as_on_vllms_own_routes(client: ScriptedClient) -> None:
    client.steps = [[400]]
    by = call(x_request_id="mine", x_session_id="s", x_vllm_priority="-3")
    generate(client, call=by)
    options = client.options
    assert options["request_id"] == "generate-mine"
    assert (options["session_id"], options["priority"]) == ("s", -3)


def test_an_adapter_is_found_by_its_name(client: ScriptedClient) -> None:
    client.steps = [[400]]
    adapter = LoRARequest("mine", 1, "/adapter")
    models = SimpleNamespace(**vars(MODELS) | {"lora_requests": {"mine": adapter}})
    for name, found in (("", None), ("demo", None), ("mine", adapter)):
        generate(client, models=models, adapter_id=name)
        assert client.options["lora_request"] is found
    message = str(refused(client, models=models, adapter_id="other"))
    assert message.endswith("`adapter_id` must be one of demo, mine. Given: 'other'")


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("json", '{"type": "nothing"', "grammar is not valid: "),
        ("json", {"type": "nothing"}, "grammar is not valid: "),
        ("regex", "[", "grammar is not valid: "),
        ("regex", {}, "`grammar` of type regex must be a string. Given: {}"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_reason(
    client: ScriptedClient, kind: str, value: Any, words: str
) -> None:
    error = refused(client, grammar={"type": kind, "value": value})
    assert error.kind == "validation"
    assert str(error).startswith(f"Input validation error: {words}")


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (QueueOverflowError(), "overloaded", "Model is overloaded"),
        (VLLMValidationError("no"), "validation", "Input validation error: no"),
        (EngineGenerateError(), "generation", "Request failed during generation: "),
        (EngineDeadError(), "generation", "Request failed during generation: "),
    ],
)
def test_each_error_of_vllm_has_its_kind(
    client: ScriptedClient, raised: Exception, kind: str, words: str
) -> None:
    client.raises = raised
    error = refused(client)
    assert (error.kind, str(error)[: len(words)]) == (kind, words)


@pytest.mark.parametrize(
    ("ends_with", "kind"),
    [(FinishReason.ERROR, "generation"), (FinishReason.ABORT, "incomplete_generation")],
)
def test_a_request_that_fails_or_is_aborted_is_an_error(
    client: ScriptedClient, ends_with: FinishReason, kind: str
) -> None:
    client.steps, client.ends_with = [[400]], ends_with
    assert refused(client).kind == kind


def test_closing_a_stream_closes_vllms_stream(client: ScriptedClient) -> None:
    client.steps = [[400], [401], [402]]
    generator = TextGenerator(client, MODELS, None, 6, has_processors=True)

    async def run() -> None:
        outputs = generator.generate(Asked(GenerateBody(inputs=PROMPT), Parameters(), True), call())
        async with aclosing(outputs):
            await anext(outputs)

    asyncio.run(run())
    assert client.was_closed


def test_parameters_that_need_processors_are_refused_without_them(
    client: ScriptedClient,
) -> None:
    client.steps = [[400]]
    for name, value in (("typical_p", 0.5), ("watermark", True)):
        fields: dict[str, Any] = {"temperature": 1.0, name: value}
        error = refused(client, has_processors=False, **fields)
        assert error.kind == "validation"
        assert f"`{name}` is not supported" in str(error)
        generate(client, **fields)
