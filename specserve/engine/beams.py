"""Beam search: the best text is learned, and ``vllm_xargs: {"beam_sample": 1}`` draws the beams.

The search is transformers' with ``do_sample``: of all beams' candidates twice the width is drawn
without replacement, by the softmax of their cumulative log-probabilities, and the best of those
drawn go on. vLLM's beam search takes the best candidates without drawing.

A beam's candidates are its most likely tokens after temperature, ``top_k`` and ``top_p``: as many
as vLLM tells log-probabilities of, 20 unless ``max_logprobs`` says otherwise.
"""

from __future__ import annotations

import asyncio
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
from specserve.sources.controls import samples_beams

Learn = Callable[[list[int], int, str], Awaitable[None]]
"""Learns a text: its tokens, how many of the first ones are prompt, and the adapter's name."""


def extend_beam_search(max_logprobs: int, learn: Learn) -> None:
    """Has vLLM's completions and chat completions draw the beams of requests that ask for it.

    Args:
        max_logprobs: the engine's: most candidates of a beam; -1: the vocabulary.
        learn: learns the best text of each search, before it is answered.
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
        is_drawn = hasattr(params, "drawing") and prompt["type"] != "embeds"  # which has no beams
        search = sampled_beam_search if is_drawn else plain
        adapter = lora_request.lora_name if lora_request is not None else ""
        async for output in search(self, prompt, request_id, params, lora_request, **options):
            best = output.outputs[0]
            if best.finish_reason in ("stop", "length"):
                asked = output.prompt_token_ids
                await learn([*asked, *best.token_ids], len(asked), adapter)
            yield output

    BeamSearchOnlineMixin.beam_search = beam_search


def _with_sampling(theirs: Any, max_logprobs: int) -> Any:
    def to_beam_search_params(
        self: Any, max_tokens: int, defaults: dict[str, Any] | None = None
    ) -> BeamSearchParams:
        params = theirs(self, max_tokens, defaults)
        penalty, most = params.length_penalty, _MOST_LENGTH_PENALTY
        if not abs(penalty) <= most:  # NaN is refused, too
            message = f"{penalty} is not allowed; allowed: from -{most} to {most}"
            raise VLLMValidationError(message, parameter="length_penalty", value=penalty)
        if samples_beams(self.vllm_xargs):
            if params.temperature < _LEAST_TEMPERATURE:
                raise _refusal("temperature", params.temperature, f"from {_LEAST_TEMPERATURE}")
            sampling = self.to_sampling_params(max_tokens, defaults or {})
            top_k = sampling.top_k if sampling.top_k > 0 else max_logprobs
            if 0 <= max_logprobs < top_k:
                if self.top_k is not None:
                    raise _refusal("top_k", top_k, f"at most {max_logprobs}")
                top_k = max_logprobs  # the checkpoint's default is nobody's wish
            params.drawing = Drawing(sampling.temperature, top_k, sampling.top_p, sampling.seed)
        elif 0 <= max_logprobs < 2 * params.beam_width:
            # vLLM takes twice as many candidates of a beam; it would tell of log-probabilities.
            width = params.beam_width
            allowed = f"at most {max_logprobs // 2}, half of engine.vllm.max_logprobs"
            message = f"n: {width} beams are not allowed; allowed: {allowed}"
            raise VLLMValidationError(message, parameter="n", value=width)
        return params

    return to_beam_search_params


_LEAST_TEMPERATURE = 0.01
_MOST_LENGTH_PENALTY = 32
"""Scores are divided by the length to this power: of a million tokens far from 0 and infinity."""


def _refusal(field: str, value: float, allowed: str) -> VLLMValidationError:
    message = f"{value} is not allowed where beam_sample draws the beams; allowed: {allowed}"
    return VLLMValidationError(message, parameter=field, value=value)


class Drawing(NamedTuple):
    """How candidates are drawn; ``top_k`` -1: of all tokens, ``seed`` None: anew each time."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | None


class Candidate(NamedTuple):
    """A beam, one token more, and the cumulative log-probability of both."""

    beam: BeamSearchSequence
    token: int
    score: float
    logprobs: Mapping[int, Logprob]
    """Of the step, by token id, as vLLM has told them."""


async def sampled_beam_search(
    handler: Any,
    prompt: Any,
    request_id: str,
    params: BeamSearchParams,
    lora_request: Any,
    **options: Any,
) -> AsyncIterator[RequestOutput]:
    """As vLLM's ``beam_search``; ``params.drawing`` tells how candidates are drawn.

    ``options`` are those of the engine's ``generate``.
    """
    drawing: Drawing = params.drawing
    generator = np.random.default_rng(drawing.seed)
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
            (ended if is_end else beams).append(_longer(each, is_end=is_end))
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
    """One token more of each beam. The requests' ids are vLLM's, by which they are known."""
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
    """The candidates of a step and their log-probabilities among themselves.

    Args:
        logprobs: by token id; more than ``top_k`` where vLLM's own choice is a further one.
        drawing: its ``temperature``, ``top_k`` and ``top_p`` are applied, in this order.
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
    """Indices drawn without replacement by the softmax of scores, by the Gumbel-top-k trick
    (Vieira, 2014; Kool et al., arXiv 1903.06059).

    Args:
        scores: log-probabilities up to a constant, float64 ``[n]``.
        number: how many; all where there are no more.
        generator: of the noise.
    """
    order: list[int] = np.argsort(-(scores + generator.gumbel(size=len(scores)))).tolist()
    return order[:number]


def _longer(candidate: Candidate, *, is_end: bool) -> BeamSearchSequence:
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
