"""Refuses requests that vLLM's V2 model runner for GPUs has no room for.

The runner keeps some sampling parameters in arrays of a fixed width. It checks their lengths in the
worker, where an error ends the engine, and with it all other requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logit_bias import (
    MAX_NUM_ALLOWED_TOKEN_IDS,
    MAX_NUM_LOGIT_BIAS_TOKENS,
    MAX_NUM_STOP_TOKEN_IDS,
)

MAX_SEED = 2**63 - 1


def check_before_sending(client: Any) -> None:
    """Makes a vLLM ``engine_core`` refuse such requests, also those of a call with ``n`` > 1."""
    send = client.add_request_async

    async def check_and_send(request: Any) -> None:
        if request.sampling_params is not None:
            check_sizes(request.sampling_params)
        await send(request)

    client.add_request_async = check_and_send


def check_sizes(params: SamplingParams) -> None:
    """Checks parameters that are ready for the engine.

    Raises:
        VLLMValidationError: one exceeds the runner's room for it.
    """
    for field, size, most in _sizes(params):
        if size > most:
            message = f"{field} must be at most {most} on this server, got {size}"
            raise VLLMValidationError(message, parameter=field.split()[-1], value=size)


def _sizes(params: SamplingParams) -> Iterator[tuple[str, int, int]]:
    """What is limited, its size, and the limit."""
    yield (
        "length of allowed_token_ids",
        len(params.allowed_token_ids or ()),
        MAX_NUM_ALLOWED_TOKEN_IDS,
    )
    yield "length of logit_bias", len(params.logit_bias or ()), MAX_NUM_LOGIT_BIAS_TOKENS
    if params.min_tokens:  # without it, the runner does not need them
        stop_tokens = len(params.all_stop_token_ids)
        yield "with min_tokens, the length of stop_token_ids", stop_tokens, MAX_NUM_STOP_TOKEN_IDS
    words = params.bad_words_token_ids or ()
    tokens = sum(1 for _ in chain.from_iterable(words))
    yield "spellings in bad_words", len(words), envs.VLLM_MAX_NUM_BAD_WORDS
    yield "tokens in bad_words", tokens, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    yield "seed plus n - 1, the last answer's seed", params.seed or 0, MAX_SEED
