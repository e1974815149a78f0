"""Repairs vLLM's sampling under speculation: refused parameters, wrong ones and wasted work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.rejection_sampler import RejectionSampler

from specserve.engine import logits_processors
from specserve.engine.sampler import (
    AskedTokensRejectionSampler,
    AskedTokensSampler,
    IndependentRejectionSampler,
    IndependentSampler,
)


def repair_sampling(runner: Any) -> None:
    """Applies all repairs of this module to a model runner.

    Call it in every rank: each rank samples by itself, and all must get the same tokens.
    """
    _restore_logits_processors(runner)
    _replace_samplers(runner, IndependentSampler, IndependentRejectionSampler)
    if may_step_plainly(runner):
        _sample_plainly_without_drafts(runner)


def _restore_logits_processors(runner: Any) -> None:
    """Enables ``min_p``, ``logit_bias`` and specserve's parameters under speculation.

    Under speculation vLLM builds the processor of ``min_tokens`` alone and refuses such requests.
    The processors need rows without drafts, so these requests are decoded without drafts.
    """
    runner.input_batch.logitsprocs = LogitsProcessors(
        processor(runner.vllm_config, runner.device, PIN_MEMORY)
        for processor in (*BUILTIN_LOGITS_PROCESSORS, *logits_processors.PROCESSORS)
    )


def is_kept_without_drafts_only(params: SamplingParams) -> bool:
    """Whether a request has a parameter that is wrong in steps that verify its drafts.

    vLLM applies ``min_p``, ``logit_bias`` and specserve's parameters only to a request's last row.
    It miscounts a ``thinking_token_budget`` when thinking begins or ends within a draft.
    """
    has_budget = params.thinking_token_budget is not None
    has_processor = bool(params.min_p or params.logit_bias)
    return has_budget or has_processor or logits_processors.are_asked_for(params)


def report_asked_tokens(runner: Any) -> None:
    """Keeps one request's ``logprob_token_ids`` out of the other answers, without drafts.

    vLLM's sampler replaces the top tokens of all requests of a step (issue 42592). Its V2 model
    runner has another sampler.
    """
    _replace_sampler(runner, AskedTokensSampler)


def keep_asked_tokens(runner: Any) -> None:
    """Lets ``logprob_token_ids`` work with vLLM's own draft methods, where it ends the engine.

    vLLM's V2 model runner has another sampler without this defect and is not changed.
    """
    if isinstance(getattr(runner, "rejection_sampler", None), RejectionSampler):
        _replace_samplers(runner, AskedTokensSampler, AskedTokensRejectionSampler)


def _replace_sampler(runner: Any, plain: type[AskedTokensSampler]) -> None:
    theirs = runner.sampler
    runner.sampler = plain(theirs.logprobs_mode, theirs.use_fp64_gumbel)


def _replace_samplers(
    runner: Any, plain: type[AskedTokensSampler], verifying: type[AskedTokensRejectionSampler]
) -> None:
    _replace_sampler(runner, plain)
    runner.rejection_sampler = verifying(runner.sampler, runner.speculative_config, runner.device)


def _sample_plainly_without_drafts(runner: Any) -> None:
    """Samples steps in which no request has a draft as without speculation.

    vLLM computes draft indices for every step and runs rejection sampling on it, also without
    drafts. That takes several times the work of plain sampling, for the same distribution.
    """
    prepare_inputs = runner._prepare_inputs

    def _prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        if scheduler_output.scheduled_spec_decode_tokens:
            return prepare_inputs(scheduler_output, num_scheduled_tokens)
        with without_speculation(runner):
            return prepare_inputs(scheduler_output, num_scheduled_tokens)

    runner._prepare_inputs = _prepare_inputs


def may_step_plainly(holder: Any) -> bool:
    """False for models with recurrent layers, which find their state by speculation's metadata.

    Args:
        holder: vLLM's model runner or configuration.
    """
    model = holder.model_config
    return not (model.has_inner_state or model.is_hybrid)


@contextmanager
def without_speculation(runner: Any) -> Iterator[None]:
    """Context in which the model runner works as if no speculation were configured."""
    config, runner.speculative_config = runner.speculative_config, None
    try:
        yield
    finally:
        runner.speculative_config = config
