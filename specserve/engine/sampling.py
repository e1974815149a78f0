"""Sampling under speculation, where vLLM does less than it could, or more than it must."""

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
    """All repairs of this module, for the model runner of every rank.

    Every rank samples for itself: one that did otherwise would go on with other tokens.
    """
    _restore_logits_processors(runner)
    _replace_samplers(runner, IndependentSampler, IndependentRejectionSampler)
    if may_step_plainly(runner):
        _sample_plainly_without_drafts(runner)


def _restore_logits_processors(runner: Any) -> None:
    """Lets requests with ``min_p`` or ``logit_bias`` be served, and those with our parameters.

    Under speculation vLLM leaves all out, and refuses such requests. They work on rows without a
    draft, so these requests are decoded without drafts.
    """
    runner.input_batch.logitsprocs = LogitsProcessors(
        processor(runner.vllm_config, runner.device, PIN_MEMORY)
        for processor in (*BUILTIN_LOGITS_PROCESSORS, *logits_processors.PROCESSORS)
    )


def is_kept_without_drafts_only(params: SamplingParams) -> bool:
    """Whether vLLM would break one of a request's parameters where drafts are verified.

    It applies ``min_p``, ``logit_bias`` and what we add to the last of a row's logits alone. A
    thought that begins or ends within a draft is miscounted against its ``thinking_token_budget``.
    """
    has_budget = params.thinking_token_budget is not None
    has_processor = bool(params.min_p or params.logit_bias)
    return has_budget or has_processor or logits_processors.are_asked_for(params)


def keep_asked_tokens(runner: Any) -> None:
    """Puts samplers in place beside vLLM's own drafts: ``logprob_token_ids`` ends no engine.

    vLLM's newer model runner has a sampler of its own, which this defect is not in.
    """
    if isinstance(getattr(runner, "rejection_sampler", None), RejectionSampler):
        _replace_samplers(runner, AskedTokensSampler, AskedTokensRejectionSampler)


def _replace_samplers(
    runner: Any, plain: type[AskedTokensSampler], verifying: type[AskedTokensRejectionSampler]
) -> None:
    theirs = runner.sampler
    runner.sampler = plain(theirs.logprobs_mode, theirs.use_fp64_gumbel)
    runner.rejection_sampler = verifying(runner.sampler, runner.speculative_config, runner.device)


def _sample_plainly_without_drafts(runner: Any) -> None:
    """Takes a step in which no request has a draft as if there were no speculation.

    vLLM works out for every step which of its logits are whose drafts', and takes it through
    rejection sampling, which then accepts nothing of nothing: several times the work of sampling,
    for the same distribution.
    """
    prepare_inputs = runner._prepare_inputs

    def _prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        if scheduler_output.scheduled_spec_decode_tokens:
            return prepare_inputs(scheduler_output, num_scheduled_tokens)
        with without_speculation(runner):
            return prepare_inputs(scheduler_output, num_scheduled_tokens)

    runner._prepare_inputs = _prepare_inputs


def may_step_plainly(runner: Any) -> bool:
    """Not with recurrent layers: speculation tells them where their state is."""
    model = runner.model_config
    return not (model.has_inner_state or model.is_hybrid)


@contextmanager
def without_speculation(runner: Any) -> Iterator[None]:
    """Within it the model runner does what it does where no speculation is configured."""
    config, runner.speculative_config = runner.speculative_config, None
    try:
        yield
    finally:
        runner.speculative_config = config
