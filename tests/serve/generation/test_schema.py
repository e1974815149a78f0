from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specserve.core.errors import GenerationError
from specserve.engine.text_request import Asked, GenerateBody, Grammar, Parameters
from specserve.serve.generation.schema import RULES, checked, refusal

MOST = 100


def asked(parameters: dict[str, Any] | None, **options: Any) -> Asked:
    body = GenerateBody.model_validate({"inputs": "a b", "parameters": parameters})
    return checked(body, MOST, **options)


def refused(body: dict[str, Any], *, streams: bool = False) -> str:
    """The error message for an invalid body."""
    try:
        checked(GenerateBody.model_validate(body), MOST, streams=streams)
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
        ({"inputs": "\ud800"}, r"`inputs` cannot be empty, and must be a string. Given: '\ud800'"),
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
    ],
)
def test_conflicting_parameters_are_refused(
    parameters: dict[str, Any], streams: bool, words: str
) -> None:
    assert words in refused({"inputs": "a", "parameters": parameters}, streams=streams)


def test_values_at_the_limits_are_accepted() -> None:
    stop = ["a", "b", "c", "d"]
    parameters = {"temperature": 2.0, "frequency_penalty": -2.0, "stop": stop, "truncate": MOST - 1}
    parameters |= {"seed": 0, "do_sample": True, "top_n_tokens": 5}
    assert asked(parameters).given.model_dump(exclude_none=True) == parameters


def test_every_field_has_a_rule() -> None:
    fields = GenerateBody.model_fields.keys() | Parameters.model_fields.keys()
    assert fields == RULES.keys()


def test_unknown_keys_are_ignored_and_null_is_absent() -> None:
    nothing = dict.fromkeys(Parameters.model_fields) | {"ignore_eos_token": True}
    assert asked(nothing).given == asked({}).given == Parameters()


@pytest.mark.parametrize(
    ("parameters", "samples"),
    [
        ({}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 1}, False),
        ({"temperature": 0.5}, True),
        ({"do_sample": True}, True),
        ({"do_sample": False, "temperature": 0.7}, True),
        ({"top_k": 1}, True),
        ({"top_p": 0.5}, True),
        ({"typical_p": 0.5}, True),
        ({"repetition_penalty": 1.2, "seed": 1}, False),
        (None, True),
    ],
)
def test_decoding_is_greedy_unless_a_parameter_asks_for_sampling(
    parameters: dict[str, Any] | None, samples: bool
) -> None:
    assert asked(parameters).given.samples == samples


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
    assert asked({"decoder_input_details": True}).details


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
    assert Grammar.model_validate(grammar).constraint() == constraint
