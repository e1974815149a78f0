"""Extends vLLM's beam search: sources learn the best text, and beams can be sampled.

``vllm_xargs: {"beam_sample": 1}`` samples beams as transformers does with ``do_sample``. Each step
draws twice the beam width from the candidates of all beams, without replacement. The softmax of the
cumulative log-probabilities weights them. The best of the drawn candidates continue.

A beam's candidates are its most likely tokens after temperature, ``top_k`` and ``top_p``. vLLM's
``max_logprobs`` limits their number; its default is 20.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.generate.beam_search.utils import (
    BeamSearchSequence,
    create_sort_beams_key_function,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.utils import random_uuid
from vllm.utils.async_utils import collect_from_async_generator

from specserve.core.types import Float64Array
from specserve.engine.tenants import IN_BEAM_SEARCH
from specserve.sources.controls import samples_beams

Learn = Callable[[list[int], int, str, float], Awaitable[None]]
"""Teaches a text to the sources: token ids, number of prompt tokens, name of the adapter, and when
the text began, in seconds since 1970."""


def extend_beam_search(max_logprobs: int, learn: Learn) -> None:
    """Adds beam sampling and learning to vLLM's completions and chat completions.

    Args:
        max_logprobs: the engine's limit, the most candidates of a beam; -1: the vocabulary.
        learn: called with the best text of each search, before the answer is sent.
    """
    for request_class in (CompletionRequest, ChatCompletionRequest):
        theirs = request_class.to_beam_search_params
        request_class.to_beam_search_params = _with_sampling(theirs, max_logprobs)
    plain = BeamSearchOnlineMixin.beam_search

    async def beam_search(
        self: Any,
        prompt: Any,
        request_id: str,
        params: BeamSearchParams,
        lora_request: Any = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        is_drawn = hasattr(params, "drawing") and prompt["type"] != "embeds"  # refused by vLLM
        search = sampled_beam_search if is_drawn else plain
        adapter = lora_request.lora_name if lora_request is not None else ""
        began = time.time()
        # Between two steps the search has no request in the engine, so others may take its places.
        self.engine_client.check_admission(params.beam_width, request_id)
        IN_BEAM_SEARCH.set(True)
        try:
            async for output in search(self, prompt, request_id, params, lora_request, **options):
                best = output.outputs[0]
                if best.finish_reason in ("stop", "length"):
                    asked = output.prompt_token_ids
                    await learn([*asked, *best.token_ids], len(asked), adapter, began)
                yield output
        finally:
            IN_BEAM_SEARCH.set(False)

    BeamSearchOnlineMixin.beam_search = beam_search


def _with_sampling(theirs: Any, max_logprobs: int) -> Any:
    def to_beam_search_params(
        self: Any, max_tokens: int, defaults: dict[str, Any] | None = None
    ) -> BeamSearchParams:
        params = theirs(self, max_tokens, defaults)
        penalty, most = params.length_penalty, _MAX_LENGTH_PENALTY
        if not abs(penalty) <= most:  # also true for NaN
            message = f"{penalty} is not allowed; allowed: from -{most} to {most}"
            raise VLLMValidationError(message, parameter="length_penalty", value=penalty)
        if samples_beams(self.vllm_xargs):
            if params.temperature < _MIN_TEMPERATURE:
                raise _refusal("temperature", params.temperature, f"from {_MIN_TEMPERATURE}")
            sampling = self.to_sampling_params(max_tokens, defaults or {})
            top_k = sampling.top_k if sampling.top_k > 0 else max_logprobs
            if 0 <= max_logprobs < top_k:
                if self.top_k is not None:
                    raise _refusal("top_k", top_k, f"at most {max_logprobs}")
                top_k = max_logprobs  # only the checkpoint's default exceeds the limit
            params.drawing = Drawing(sampling.temperature, top_k, sampling.top_p, sampling.seed)
        elif 0 <= max_logprobs < 2 * params.beam_width:
            # vLLM asks for 2 * width log-probabilities; its own error would name only those.
            width = params.beam_width
            allowed = f"at most {max_logprobs // 2}, half of engine.vllm.max_logprobs"
            message = f"n: {width} beams are not allowed; allowed: {allowed}"
            raise VLLMValidationError(message, parameter="n", value=width)
        return params

    return to_beam_search_params


_MIN_TEMPERATURE = 0.01
_MAX_LENGTH_PENALTY = 32
"""Scores are divided by length ** penalty. 32 stays within float64 for a million tokens."""


def _refusal(field: str, value: float, allowed: str) -> VLLMValidationError:
    message = f"{value} is not allowed where beam_sample draws the beams; allowed: {allowed}"
    return VLLMValidationError(message, parameter=field, value=value)


class Drawing(NamedTuple):
    """Sampling settings of a search; ``top_k`` -1: all tokens, ``seed`` None: a new seed."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | None


class Candidate(NamedTuple):
    """A beam and a next token, with their cumulative log-probability as ``score``."""

    beam: BeamSearchSequence
    token: int
    score: float
    logprobs: Mapping[int, Logprob]
    """vLLM's log-probabilities of the step, by token id."""


async def sampled_beam_search(
    handler: Any,
    prompt: Any,
    request_id: str,
    params: BeamSearchParams,
    lora_request: Any,
    **options: Any,
) -> AsyncIterator[RequestOutput]:
    """Replaces vLLM's ``beam_search`` for requests that sample their beams.

    ``params.drawing`` has the sampling settings. ``options`` go to the engine's ``generate``.
    """
    drawing: Drawing = params.drawing
    generator = np.random.default_rng(None if drawing.seed is None else drawing.seed % 2**64)
    step = SamplingParams(
        logprobs=drawing.top_k, max_tokens=1, watermarking=False, detokenize=False
    )
    tokenizer = handler.renderer.get_tokenizer()
    asked = prompt["prompt_token_ids"]
    beams = [BeamSearchSequence(prompt, asked, [], lora_request=lora_request)]
    ended: list[BeamSearchSequence] = []
    for _ in range(params.max_tokens):
        outputs = await _next_tokens(handler.engine_client, beams, request_id, step, options)
        if failed := {each.finish_reason for each in outputs} & {"error", "abort"}:
            ended, beams = [], [replace(beams[0], finish_reason=failed.pop())]
            break
        found = [
            Candidate(beam, token, beam.cum_logprob + score, output.logprobs[0])
            for beam, output in zip(beams, outputs, strict=True)
            for token, score in warped(output.logprobs[0], drawing)
        ]
        scores = np.array([each.score for each in found])
        drawn = [found[index] for index in draw(scores, 2 * params.beam_width, generator)]
        drawn.sort(key=lambda each: -each.score)
        beams = []
        for each in drawn:
            is_end = each.token == tokenizer.eos_token_id and not params.ignore_eos
            (ended if is_end else beams).append(_extended(each, is_end=is_end))
        beams = beams[: params.beam_width]
        if not beams:
            break
    key = create_sort_beams_key_function(tokenizer.eos_token_id, params.length_penalty)
    best = sorted([*ended, *beams], key=key, reverse=True)[: params.beam_width]
    texts = [_output(index, each, len(asked), tokenizer, params) for index, each in enumerate(best)]
    yield RequestOutput(request_id, prompt.get("prompt"), asked, None, texts, finished=True)


async def _next_tokens(
    engine: Any,
    beams: Sequence[BeamSearchSequence],
    request_id: str,
    step: SamplingParams,
    options: Mapping[str, Any],
) -> list[CompletionOutput]:
    """Generates one token for each beam."""
    name = f"{request_id}-{random_uuid()}"
    streams = [
        engine.generate(
            beam.get_prompt(),
            step,
            f"{name}-beam-{index}",
            lora_request=beam.lora_request,
            **options,
        )
        for index, beam in enumerate(beams)
    ]
    outputs = await asyncio.gather(*map(collect_from_async_generator, streams))
    return [each[-1].outputs[0] for each in outputs]


def warped(logprobs: Mapping[int, Logprob], drawing: Drawing) -> list[tuple[int, float]]:
    """A beam's candidate tokens, with log-probabilities normalized over the candidates.

    Args:
        logprobs: by token id. There is one more than ``top_k`` where vLLM sampled another token.
        drawing: applied in the order ``top_k``, ``temperature``, ``top_p``.
    """
    best = sorted(logprobs.items(), key=lambda each: -each[1].logprob)
    if drawing.top_k > 0:
        best = best[: drawing.top_k]
    scores = np.array([each.logprob for _, each in best]) / drawing.temperature
    scores -= np.logaddexp.reduce(scores)
    before = np.cumsum(np.exp(scores)) - np.exp(scores)
    kept = max(int(np.count_nonzero(before < drawing.top_p)), 1)
    scores = scores[:kept] - np.logaddexp.reduce(scores[:kept])
    return [(token, float(score)) for (token, _), score in zip(best, scores, strict=False)]


def draw(scores: Float64Array, number: int, generator: np.random.Generator) -> list[int]:
    """Draws indices without replacement by the softmax of the scores.

    Uses the Gumbel-top-k trick (Vieira, 2014; Kool et al., arXiv 1903.06059).

    Args:
        scores: log-probabilities up to a constant, float64 ``[n]``.
        number: how many to draw; all ``n`` if there are fewer.
        generator: source of the noise.
    """
    order: list[int] = np.argsort(-(scores + generator.gumbel(size=len(scores)))).tolist()
    return order[:number]


def _extended(candidate: Candidate, *, is_end: bool) -> BeamSearchSequence:
    beam = candidate.beam
    return replace(
        beam,
        tokens=[*beam.tokens, candidate.token],
        logprobs=[*beam.logprobs, candidate.logprobs],
        cum_logprob=candidate.score,
        finish_reason="stop" if is_end else None,
        stop_reason=candidate.token if is_end else None,
    )


def _output(
    index: int, beam: BeamSearchSequence, start: int, tokenizer: Any, params: BeamSearchParams
) -> CompletionOutput:
    tokens = beam.tokens[start:]
    is_ended = beam.finish_reason == "stop"
    if is_ended and not params.include_stop_str_in_output:
        tokens = tokens[:-1]
    text = tokenizer.decode(
        beam.tokens[start:-1] if is_ended else tokens,
        skip_special_tokens=params.skip_special_tokens,
    )
    return CompletionOutput(
        index,
        text,
        tokens,
        beam.cum_logprob,
        beam.logprobs,
        finish_reason=beam.finish_reason or "length",
        stop_reason=beam.stop_reason,
    )
