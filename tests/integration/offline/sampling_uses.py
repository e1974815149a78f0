"""Every sampling parameter of vLLM: a request that uses it, or the reason why none does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from tests.integration.offline.batches import Written

MAX_TOKENS = 24
THINK, END = "<|system|>", "</think>"
"""Marks of the beginning and end of reasoning. No prompt has the first, no text the second."""

Params = dict[str, Any]
SAMPLED: Params = {"temperature": 0.8, "seed": 7}


@dataclass(frozen=True)
class Use:
    """One way to use a parameter.

    Attributes:
        params: makes the request's parameters from its answer without any.
        prompt_end: text after the prompt.
        shows: whether the parameter changes the answer.
    """

    params: Callable[[Written], Params]
    prompt_end: str = ""
    shows: bool = True


def fixed(**params: Any) -> Use:
    """A use with fixed parameters."""
    return Use(lambda _: params)


def unseen(**params: Any) -> Use:
    """A use with fixed parameters that do not change the answer."""
    return Use(lambda _: params, shows=False)


def thinking(budget: int) -> Use:
    """A use whose output begins inside reasoning."""
    return Use(lambda _: {"thinking_token_budget": budget}, prompt_end=THINK)


def middle(plain: Written) -> str:
    """A few characters from the middle of the text."""
    return plain.text[len(plain.text) // 2 :][:4]


def words(plain: Written) -> list[str]:
    """The words of the text, each alone and after an underscore."""
    return [begin + word for word in re.findall("[a-z]+", plain.text) for begin in ("", "_")]


def a_repeated_token(plain: Written) -> tuple[int, int]:
    """A token that has occurred before, and its position."""
    ids = plain.token_ids
    place = max(place for place in range(1, MAX_TOKENS - 4) if ids[place] in ids[:place])
    return ids[place], place


def stop_token_with_min_tokens(plain: Written) -> Params:
    token, place = a_repeated_token(plain)
    return {"stop_token_ids": [token], "min_tokens": place}


def allow_all_but_a_repeated_token(plain: Written) -> Params:
    token, _ = a_repeated_token(plain)
    return {"allowed_token_ids": sorted({*plain.token_ids} - {token})}


def three_unlikely_tokens(plain: Written) -> list[int]:
    return sorted({*range(300, 340)} - {*plain.token_ids})[:3]


USES: dict[str, tuple[Use, ...]] = {
    "n": (fixed(n=2, **SAMPLED),),
    "presence_penalty": (fixed(presence_penalty=1.5),),
    "frequency_penalty": (fixed(frequency_penalty=1.5),),
    "repetition_penalty": (fixed(repetition_penalty=1.7),),
    "temperature": (fixed(temperature=0.9, seed=7),),
    "top_p": (fixed(top_p=0.3, **SAMPLED),),
    "top_k": (fixed(top_k=2, **SAMPLED),),
    "min_p": (fixed(min_p=0.4, **SAMPLED),),
    "seed": (fixed(temperature=1.0, seed=11),),
    "stop": (Use(lambda plain: {"stop": [middle(plain)]}),),
    "include_stop_str_in_output": (
        Use(lambda plain: {"stop": [middle(plain)], "include_stop_str_in_output": True}),
    ),
    "stop_token_ids": (Use(lambda plain: {"stop_token_ids": [a_repeated_token(plain)[0]]}),),
    "min_tokens": (Use(stop_token_with_min_tokens),),
    "max_tokens": (fixed(max_tokens=9),),
    "ignore_eos": (fixed(ignore_eos=True, logit_bias={1: 100.0}),),
    "logprobs": (fixed(logprobs=4),),
    "flat_logprobs": (unseen(logprobs=4, flat_logprobs=True),),
    "prompt_logprobs": (fixed(prompt_logprobs=1),),
    "logprob_token_ids": (
        Use(lambda plain: {"logprob_token_ids": three_unlikely_tokens(plain)}),
        Use(lambda plain: {"logprob_token_ids": three_unlikely_tokens(plain), "logprobs": 3}),
    ),
    "detokenize": (fixed(detokenize=False),),
    "skip_special_tokens": (fixed(skip_special_tokens=False, logit_bias={4: 100.0}, max_tokens=3),),
    "spaces_between_special_tokens": (unseen(spaces_between_special_tokens=False),),
    "stream_interval": (unseen(stream_interval=5),),
    "structured_outputs": (
        fixed(structured_outputs=StructuredOutputsParams(choice=["return", "while true"])),
        fixed(structured_outputs=StructuredOutputsParams(regex="(ab|cd){10}")),
    ),
    "logit_bias": (Use(lambda plain: {"logit_bias": {a_repeated_token(plain)[0]: -100.0}}),),
    "allowed_token_ids": (Use(allow_all_but_a_repeated_token),),
    "bad_words": (Use(lambda plain: {"bad_words": words(plain)}),),
    "extra_args": tuple(
        unseen(extra_args=controls)
        for controls in ({"speculation": "off"}, {"max_draft_tokens": 1}, {"learn": 0})
    ),
    "skip_reading_prefix_cache": (unseen(skip_reading_prefix_cache=True),),
    "thinking_token_budget": tuple(thinking(budget) for budget in (0, 5, 10)),
    "repetition_detection": (
        fixed(
            allowed_token_ids=[300, 301],
            repetition_detection=RepetitionDetectionParams(
                max_pattern_size=2, min_pattern_size=1, min_count=2
            ),
        ),
    ),
}

UNUSED: dict[str, str] = {
    "watermarking": "needs a watermark in the engine's configuration",
    "prompt_logprob_token_ids": "refused: for vLLM's V2 model runner",
    "prompt_logprob_start": "refused: for vLLM's V2 model runner",
    "trace_decode_token_ids": "refused: needs an engine that replays traces",
    "routed_experts_prompt_start": "needs an engine that returns routed experts",
    "output_kind": "how answers are cut into parts; the tests look at whole answers",
    "skip_clone": "whether vLLM copies the object",
    "output_text_buffer_length": "set by vLLM, from `stop`",
    "_eos_token_id": "set by vLLM, from the model",
    "_all_stop_token_ids": "set by vLLM, from `stop_token_ids` and the model",
    "_watermarking_skipped": "set by vLLM, from `watermarking`",
    "_bad_words_token_ids": "set by vLLM, from `bad_words`",
}
