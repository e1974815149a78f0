"""Bodies for fuzzing: valid examples of each route, and options to add to them."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import Any

import torch
from transformers import AutoConfig

from tests.integration.api import MODEL
from tests.integration.cluster import model_path

Body = dict[str, Any]

LONGEST = 12
"""Maximum number of tokens that a case may request."""
MAX_SEQUENCES = 3

_PROMPT = "for number in numbers:\n    total += number\n" * 3
_MESSAGES = [{"role": "user", "content": _PROMPT}]
_TOKENS = list(range(40, 60)) * 2
_SAMPLED = {"model": MODEL, "max_tokens": 8}


def _embeddings(num_tokens: int) -> str:
    """A prompt of embeddings for the demo's draft model, as vLLM takes it."""
    shape = (num_tokens, AutoConfig.from_pretrained(model_path("demo-draft")).hidden_size)
    content = BytesIO()
    torch.save(torch.zeros(shape), content)
    return b64encode(content.getvalue()).decode()


EXAMPLES: dict[str, Body] = {
    "/v1/completions": {**_SAMPLED, "prompt": _PROMPT},
    "/invocations": {**_SAMPLED, "prompt": _PROMPT},
    "/v1/completions/render": {**_SAMPLED, "prompt": _PROMPT},
    "/v1/chat/completions": {**_SAMPLED, "messages": _MESSAGES},
    "/v1/chat/completions/render": {**_SAMPLED, "messages": _MESSAGES},
    "/v1/chat/completions/batch": {**_SAMPLED, "messages": [_MESSAGES, _MESSAGES]},
    "/v1/messages": {**_SAMPLED, "messages": _MESSAGES},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": _MESSAGES},
    "/v1/responses": {"model": MODEL, "input": _PROMPT, "max_output_tokens": 8},
    "/inference/v1/generate": {"token_ids": _TOKENS, "sampling_params": {"max_tokens": 8}},
    "/inference/v1/abort_requests": {"request_ids": ["none"]},
    "/generative_scoring": {
        "model": MODEL,
        "query": _PROMPT,
        "items": ["a", "b"],
        "label_token_ids": [40, 41],
    },
    "/v1/systemone": {"model": MODEL, "state": "x", "questions": {"q": {"type": "boolean"}}},
    "/tokenize": {"model": MODEL, "prompt": _PROMPT},
    "/detokenize": {"model": MODEL, "tokens": _TOKENS},
    "/generate": {"inputs": _PROMPT, "parameters": {"max_new_tokens": 8}},
    "/generate_stream": {"inputs": _PROMPT, "parameters": {"max_new_tokens": 8}},
    "/": {"inputs": _PROMPT, "parameters": {"max_new_tokens": 8}},
}

_JSON_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
_ENDLESS_SCHEMA = {
    "type": "object",
    "properties": {"n": {"$ref": "#"}},
    "required": ["n"],
    "additionalProperties": False,
}
_TOOL = {"name": "look", "parameters": _JSON_SCHEMA}

_SAMPLING: list[Body] = [
    {"temperature": 0},
    {"temperature": 1.5, "seed": 7},
    {"temperature": 1, "n": 2},
    {"top_p": 0.5},
    {"top_k": 5, "min_p": 0.1},
    {"stop": ["\n"]},
    {"stop_token_ids": [44], "include_stop_str_in_output": True},
    {"ignore_eos": True, "min_tokens": 4},
    {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.3},
    {"bad_words": ["total"]},
    {"allowed_token_ids": [40, 41, 42]},
    {"prompt_logprobs": 2},
    {"logit_bias": {"44": 5}},
    {"logprob_token_ids": [44, 45]},
    {"thinking_token_budget": 4},
    {"skip_special_tokens": False},
    {"structured_outputs": {"regex": "[ab]{2,6}"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"json": _JSON_SCHEMA}},
    {"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}},
    {"structured_outputs": {"grammar": 'root ::= "a" x\nx ::= "b" root'}},
    {"structured_outputs": {"json": _ENDLESS_SCHEMA}},
    {"structured_outputs": {"regex": "x\u0430(\u0434\u0430|\u0434\u043e)"}},
]
_REQUEST: list[Body] = [
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"vllm_xargs": {"speculation": "off"}},
    {"vllm_xargs": {"speculation": "ngram", "max_draft_tokens": 2, "learn": 0, "report": 1}},
    {"vllm_xargs": {"max_draft_tokens": 0}},
    {"vllm_xargs": {"prediction": [_PROMPT, "total"]}},
    {"prediction": {"type": "content", "content": [{"type": "text", "text": _PROMPT}]}},
    {"vllm_xargs": {"max_draft_tokens": -1}},
    {"cache_salt": "salt"},
    {"request_id": "same"},
]
_OPENAI: list[Body] = [
    *_SAMPLING,
    *_REQUEST,
    {"use_beam_search": True, "n": 2},
    {"use_beam_search": True, "n": 2, "vllm_xargs": {"beam_sample": 1}},
    {"response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": _JSON_SCHEMA},
        }
    },
    {"return_token_ids": True},
    {"return_tokens_as_token_ids": True},
    {"truncate_prompt_tokens": 8},
    {"echo": True},
    {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
]
_COMPLETION: list[Body] = [
    *_OPENAI,
    {"logprobs": 3},
    {"prompt": _TOKENS},
    {"prompt": [_PROMPT, "def f("]},
    {"suffix": "end"},
    {"prompt": None, "prompt_embeds": "AAAA"},
    {"prompt": None, "prompt_embeds": _embeddings(24)},
]
_CHAT: list[Body] = [
    *_OPENAI,
    {"logprobs": True, "top_logprobs": 3},
    {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "auto"},
    {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"reasoning_effort": "low"},
]

_GENERATION: list[Body] = [
    {"parameters": {"max_new_tokens": 8, **each}}
    for each in (
        {"details": True, "decoder_input_details": True, "top_n_tokens": 5},
        {"do_sample": True, "temperature": 0.5, "top_k": 10, "top_p": 0.95, "typical_p": 0.5},
        {"do_sample": True, "best_of": 2, "details": True},
        {"repetition_penalty": 1.03, "frequency_penalty": -1, "watermark": True},
        {"seed": 7, "typical_p": 0.1, "watermark": True, "top_n_tokens": 1},
        {"stop": ["\n"], "truncate": 5, "return_full_text": True},
        {"grammar": {"type": "json", "value": _JSON_SCHEMA}},
        {"grammar": {"type": "regex", "value": "[ab]{2,6}"}, "watermark": True},
    )
]

OPTIONS: dict[str, list[Body]] = {
    "/generate": [*_GENERATION, *_REQUEST[2:6], {"stream": True}],
    "/generate_stream": [*_GENERATION, *_REQUEST[2:6]],
    "/": [*_GENERATION, {"stream": True}],
    "/v1/completions": _COMPLETION,
    "/invocations": _COMPLETION,
    "/v1/completions/render": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/v1/chat/completions/render": _CHAT,
    "/v1/chat/completions/batch": _CHAT,
    "/v1/messages": [
        *_REQUEST,
        {"temperature": 0.7, "top_k": 5},
        {"stop_sequences": ["\n"]},
        {"system": "be brief"},
        {"tools": [{"name": "look", "input_schema": _JSON_SCHEMA}]},
        {"thinking": {"type": "enabled", "budget_tokens": 4}},
    ],
    "/v1/responses": [
        *_REQUEST,
        *({key: each[key] for key in each} for each in _SAMPLING if "n" not in each),
        {"input": [{"role": "user", "content": "hello"}]},
        {"instructions": "be brief"},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": _JSON_SCHEMA}}},
        {"tools": [{"type": "function", **_TOOL}]},
        {"background": True, "store": True},
        {"enable_response_messages": True},
    ],
    "/inference/v1/generate": [
        *({"sampling_params": {"max_tokens": 8, **each}} for each in _SAMPLING),
        {"sampling_params": {"max_tokens": 8, "extra_args": {"speculation": "off"}}},
        {"sampling_params": {"max_tokens": 8, "logprobs": 2, "prompt_logprobs": 1}},
        {"sampling_params": {"max_tokens": 8, "n": 2, "temperature": 1}},
        {"output_mode": "text"},
        {"return_token_ids": True},
        *_REQUEST[:2],
    ],
    "/generative_scoring": [{"item_first": True}, {"apply_softmax": False}, {"items": ["a"] * 5}],
    "/tokenize": [{"prompt": "", "add_special_tokens": False}, {"return_token_strs": True}],
}

ODD_BODIES: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe\xfd",
    b"[" * 100_000,
    b'{"model": "demo", "prompt": ' + b"[" * 100_000,
    b'{"model": "demo", "prompt": "\\ud800", "max_tokens": 2}',
    b'{"model": "demo", "prompt": "x", "max_tokens": 2, "temperature": NaN}',
    b'{"model": "demo", "prompt": "x", "max_tokens": 2, "top_p": 1e999}',
    b'{"model": "demo", "prompt": "x", "max_tokens": 2, "seed": ' + b"9" * 400 + b"}",
    b'{"model": "demo", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    '{"model": "demo", "prompt": "x", "max_tokens": 2}'.encode("utf-16"),
    '{"model": "demo", "prompt": "x", "max_tokens": 2}'.encode("utf-32-le"),
    b'{"new_data_parallel_size": "x"}',
    b'{"inputs": "\\ud800", "parameters": {"max_new_tokens": 2}}',
    b'{"inputs": "x", "parameters": {"max_new_tokens": 2, "seed": ' + b"9" * 400 + b"}}",
    b'{"inputs": "x", "parameters": {"max_new_tokens": 2, "typical_p": NaN}}',
]
"""Bodies that no schema describes."""


def bounded(body: Body) -> Body:
    """The body with limits that keep a case short."""
    body = dict(body)
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if isinstance(value := body.get(key), int | float):
            body[key] = min(value, LONGEST)
    if isinstance(number := body.get("n"), int | float):
        body["n"] = min(number, MAX_SEQUENCES)
    if isinstance(sampling := body.get("sampling_params"), dict):
        body["sampling_params"] = sampling = bounded(sampling)
        if sampling.get("max_tokens") is None:  # the rest of the context
            sampling["max_tokens"] = LONGEST
    if isinstance(parameters := body.get("parameters"), dict):
        longest = min(parameters.get("max_new_tokens") or LONGEST, LONGEST)
        body["parameters"] = {**parameters, "max_new_tokens": longest}
    elif "inputs" in body and parameters is None:
        body["parameters"] = {"max_new_tokens": LONGEST}
    if "messages" in body or "prompt" in body:
        body.setdefault("max_tokens", LONGEST)
        body["max_tokens"] = body["max_tokens"] or LONGEST
    if "input" in body:
        body["max_output_tokens"] = body.get("max_output_tokens") or LONGEST
    return body
