from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specserve.core.errors import GenerationError
from specserve.engine.text_request import TextRequest
from specserve.serve.generation.schema import (
    RULES,
    GenerateBody,
    Parameters,
    refusal,
    text_request,
)

MOST = 100


def asked(parameters: dict[str, Any] | None, **options: Any) -> TextRequest:
    body = GenerateBody.model_validate({"inputs": "a b", "parameters": parameters})
    return text_request(body, MOST, **{"streams": False, **options})


def test_engine_arguments_are_passed_on() -> None:
    body = GenerateBody.model_validate({"inputs": "a", "vllm_xargs": {"a_processor": 1}})
    assert text_request(body, MOST, streams=False).extra_args == {"a_processor": 1}
    assert asked(None).extra_args == {}


def refused(body: dict[str, Any], *, streams: bool = False) -> str:
    """The error message for an invalid body."""
    try:
        text_request(GenerateBody.model_validate(body), MOST, streams=streams)
    except ValidationError as error:
        return str(refusal(error.errors()))
    except GenerationError as error:
        return str(error)
    raise AssertionError("it was accepted")


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("best_of", [0, 3, 1.5, "2", True], "must be > 0 and <= 2"),
        ("temperature", [0, 0.0, 5e-324, -1, float("nan")], "must be strictly positive"),
        ("temperature", ["1", True], "must be a number"),
        ("temperature", [2.5], "must be <= 2"),
        ("top_k", [0, -1], "must be strictly positive"),
        ("top_k", [2**31], "must be <= 2147483647"),
        ("top_k", [1.0, "1", 1.5], "must be an integer"),
        ("top_p", [0, 5e-324, 1, 1.0, -0.1, "0.5"], "must be > 0.0 and < 1.0"),
        ("typical_p", [0, 1, 2, []], "must be > 0.0 and < 1.0"),
        ("repetition_penalty", [0, 5e-324, -1.0, float("inf")], "must be strictly positive"),
        ("frequency_penalty", [-2.1, 2.1, "x"], "must be >= -2.0 and <= 2.0"),
        ("max_new_tokens", [0, -5], "must be strictly positive"),
        ("max_new_tokens", [2.5], "must be an integer"),
        ("max_new_tokens", [2**31], "must be <= 2147483647"),
        ("stop", [["a"] * 5, [1], 3, "", [""]], "supports up to 4 stop sequences, none of them"),
        ("truncate", [0, -1], "must be strictly positive"),
        ("truncate", [MOST, MOST + 1], f"must be strictly positive and less than {MOST}"),
        ("seed", [-1, 2**64, 0.5], "must be >= 0 and <= 18446744073709551615"),
        ("top_n_tokens", [-1, 6], "must be >= 0 and <= 5"),
        ("details", [1, "true"], "must be a boolean"),
        ("watermark", [0], "must be a boolean"),
        ("adapter_id", [3], "must be a string"),
        (
            "grammar",
            ["{}", {"type": "bnf", "value": "x"}, {"type": "json"}],
            'must have the "type"',
        ),
    ],
)
def test_a_parameter_out_of_range_is_refused_with_name_limit_and_value(
    name: str, values: list[Any], sentence: str
) -> None:
    for value in values:
        message = refused({"inputs": "a", "parameters": {name: value}})
        assert message.startswith(f"Input validation error: `{name}` {sentence}"), value
        assert ". Given: " in message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "`inputs` cannot be empty, and must be a string. Given: None"),
        ({"inputs": ""}, "`inputs` cannot be empty, and must be a string. Given: ''"),
        ({"inputs": ["a"]}, "`inputs` cannot be empty, and must be a string. Given: ['a']"),
        ({"inputs": "a", "parameters": []}, "`parameters` must be an object. Given: []"),
        ({"inputs": "a", "stream": 1}, "`stream` must be a boolean. Given: 1"),
        ({"inputs": "a", "vllm_xargs": "x"}, "`vllm_xargs` must be an object. Given: 'x'"),
    ],
)
def test_the_fields_beside_the_parameters_are_checked_too(body: dict[str, Any], words: str) -> None:
    assert refused(body) == f"Input validation error: {words}"


@pytest.mark.parametrize(
    ("parameters", "streams", "words"),
    [
        ({"best_of": 2}, False, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, False, "`seed` must not be set"),
        ({"best_of": 2, "do_sample": True}, True, "not supported when streaming tokens"),
        ({"decoder_input_details": True}, True, "not supported when streaming tokens"),
        ({"grammar": {"type": "regex", "value": {}}}, False, "regex must be a string"),
    ],
)
def test_conflicting_parameters_are_refused(
    parameters: dict[str, Any], streams: bool, words: str
) -> None:
    assert words in refused({"inputs": "a", "parameters": parameters}, streams=streams)


def test_values_at_the_limits_are_accepted() -> None:
    stop = ["a", "b", "c", "d"]
    parameters = {"temperature": 2.0, "frequency_penalty": -2.0, "stop": stop, "truncate": MOST - 1}
    request = asked(parameters | {"seed": 0, "do_sample": True, "top_n_tokens": 5})
    assert (request.temperature, request.frequency_penalty, request.seed) == (2.0, -2.0, 0)
    assert (request.stop, request.truncate, request.num_top_tokens) == (tuple(stop), MOST - 1, 5)


def test_every_field_has_a_rule() -> None:
    fields = GenerateBody.model_fields.keys() | Parameters.model_fields.keys()
    assert fields == RULES.keys()


def test_unknown_keys_are_ignored_and_null_is_absent() -> None:
    nothing = dict.fromkeys(Parameters.model_fields) | {"ignore_eos_token": True}
    assert asked(nothing) == asked({})
    assert asked({}) == TextRequest(inputs="a b")


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 1.0}, 0.0),
        ({"temperature": 1}, 0.0),
        ({"temperature": 0.5}, 0.5),
        ({"do_sample": True}, 1.0),
        ({"do_sample": False, "temperature": 0.7}, 0.7),
        ({"top_k": 1}, 1.0),
        ({"top_p": 0.5}, 1.0),
        ({"typical_p": 0.5}, 1.0),
        ({"repetition_penalty": 1.2, "seed": 1}, 0.0),
        (None, 1.0),
    ],
)
def test_decoding_is_greedy_unless_a_parameter_asks_for_sampling(
    parameters: dict[str, Any] | None, temperature: float
) -> None:
    assert asked(parameters).temperature == temperature


def test_a_seed_is_drawn_if_the_details_report_it() -> None:
    sampled = {"do_sample": True}
    assert asked(sampled).seed is None
    drawn = [asked(sampled | {"details": True}).seed for _ in range(2)]
    assert None not in drawn
    assert drawn[0] != drawn[1]
    assert asked(sampled | {"seed": 2**64 - 1}).seed == 2**64 - 1
    assert asked({"seed": 3, "details": True}).seed is None


def test_tokens_are_reported_in_details_and_in_streams() -> None:
    assert not asked({}).with_tokens
    assert asked({}, streams=True).with_tokens
    assert asked({"details": True}).with_tokens
    with_prompt = asked({"decoder_input_details": True})
    assert with_prompt.details
    assert with_prompt.with_prompt


@pytest.mark.parametrize(
    ("given", "full_text", "before"),
    [(None, False, ""), (None, True, "a b"), (True, False, "a b"), (False, True, "")],
)
def test_the_full_text_begins_with_the_prompt(
    given: bool | None, full_text: bool, before: str
) -> None:
    assert asked({"return_full_text": given}, full_text=full_text).before == before


@pytest.mark.parametrize(
    ("grammar", "constraint"),
    [
        ({"type": "json", "value": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"type": "json", "value": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"type": "json_schema", "value": {"name": "n", "schema": {}}}, {"json": {}}),
        ({"type": "regex", "value": "[ab]+"}, {"regex": "[ab]+"}),
    ],
)
def test_a_grammar_is_a_json_schema_or_an_expression(
    grammar: dict[str, Any], constraint: dict[str, Any]
) -> None:
    assert asked({"grammar": grammar}).grammar == constraint


def test_stop_may_be_one_string_or_several() -> None:
    assert asked({"stop": "\n"}).stop == ("\n",)
    assert asked({"stop": ["a", "b"]}).stop == ("a", "b")
