"""Refuses requests that vLLM's V2 model runner for GPUs has no room for.

The runner keeps some sampling parameters in arrays of a fixed width. It checks their lengths in the
worker, where an error ends the engine, and with it all other requests.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    for field, what, size, most in _sizes(params):
        if size > most:
            message = f"{field}: {what} must be at most {most} on this server, got {size}"
            raise VLLMValidationError(message, parameter=field, value=size)


def _sizes(params: SamplingParams) -> Iterator[tuple[str, str, int, int]]:
    """Field, what is limited, its size, and the limit."""
    allowed, biased = params.allowed_token_ids or (), params.logit_bias or ()
    yield "allowed_token_ids", "their number", len(allowed), MAX_NUM_ALLOWED_TOKEN_IDS
    yield "logit_bias", "the number of tokens", len(biased), MAX_NUM_LOGIT_BIAS_TOKENS
    if params.min_tokens:  # without it, the runner does not need them
        stops = params.all_stop_token_ids
        yield "stop_token_ids", "their number with min_tokens", len(stops), MAX_NUM_STOP_TOKEN_IDS
    words = params.bad_words_token_ids or ()
    yield "bad_words", "the number of spellings", len(words), envs.VLLM_MAX_NUM_BAD_WORDS
    num_tokens = sum(map(len, words))
    yield "bad_words", "the number of tokens", num_tokens, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    yield "seed", "the last answer's, seed + n - 1,", params.seed or 0, MAX_SEED
