"""Samples tokens on CPU and verifies drafts without probabilities, by one random number per token.

vLLM's rejection sampler (arXiv 2211.17192) accepts a draft token with its target probability. It
also draws a replacement for every draft token, with a random number for each token of the
vocabulary. Here every position is sampled from the target. Draft tokens are accepted up to the
first that differs from the sampled token, which replaces it. For drafts without probabilities the
distribution is the same. Positions after that one are not sampled.

All tokens of a step are sampled in one call, unless a request has a ``seed`` or parameters that
change or report its logits, apart from ``temperature``, ``top_k`` and ``top_p``. vLLM first samples
the tokens after the drafts with its sampler, in some forty operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import GREEDY_TEMPERATURE, RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from specserve.core.types import Float32Array, Float64Array, Int64Array
from specserve.engine.cpu.drawing import Verifier

_USERS = {
    AdapterLogitsProcessor: "req_info",
    LogitBiasLogitsProcessor: "biases",
    MinPLogitsProcessor: "min_p_count",
    MinTokensLogitsProcessor: "min_toks",
}
"""The attribute of a logits processor that is empty or 0 while no request uses it."""


def sample_by_drawing() -> None:
    """Replaces the sampling of steps without drafts in vLLM's sampler, in this process.

    vLLM draws a random number for each token of the vocabulary. If any request has a ``seed``, the
    step stays vLLM's: the seed must give the text of ``vllm serve``, whatever runs beside it.
    """
    drawing, vllms = Drawing(), Sampler.forward

    def forward(
        sampler: Sampler,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        if predict_bonus_token or not is_plain(sampling_metadata):
            return vllms(
                sampler, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override
            )
        counts, drafts = np.zeros(len(logits), np.int64), torch.zeros(0, dtype=torch.int32)
        return SamplerOutput(drawing.all_tokens(logits, counts, drafts, sampling_metadata), None)

    Sampler.forward = forward


def verify_by_drawing() -> None:
    """Replaces the verification in vLLM's rejection sampler, in this process."""
    drawing, vllms = Drawing(), RejectionSampler.forward

    def forward(
        sampler: RejectionSampler,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        if not is_plain(sampling_metadata):
            return vllms(sampler, metadata, draft_probs, logits, sampling_metadata)
        counts = np.array(metadata.num_draft_tokens)
        tokens = drawing.all_tokens(logits, counts, metadata.draft_token_ids, sampling_metadata)
        return SamplerOutput(tokens, None)

    RejectionSampler.forward = forward
    rejection_sampler.rejection_sample = drawing.rejection_sample


def is_plain(sampling_metadata: SamplingMetadata) -> bool:
    """Whether the requests have only parameters that :meth:`Drawing.all_tokens` supports."""
    holder = sampling_metadata.thinking_budget_state_holder
    return (
        not sampling_metadata.generators
        and sampling_metadata.max_num_logprobs is None
        and sampling_metadata.no_penalties
        and sampling_metadata.allowed_token_ids_mask is None
        and not sampling_metadata.bad_words_token_ids
        and not sampling_metadata.logprob_token_ids
        and not (holder is not None and holder.has_tracked_requests())
        and not any(map(_is_used, sampling_metadata.logitsprocs.all))
    )


def _is_used(processor: LogitsProcessor) -> bool:
    """Whether a processor may change logits in this step. An unknown one may."""
    for kind, name in _USERS.items():
        if type(processor).apply is kind.apply:
            return bool(getattr(processor, name))
    return True


class Drawing:
    """Samples the tokens of steps of n requests with m draft tokens.

    All methods return int32 ``[n, longest draft + 1]``: accepted tokens and one more, then -1.
    """

    def __init__(self) -> None:
        self._verifier = Verifier()

    def all_tokens(
        self,
        logits: torch.Tensor,
        counts: Int64Array,
        drafts: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> torch.Tensor:
        """Samples also the tokens after the drafts.

        Args:
            logits: ``[m + n, vocab_size]``; each request has a row more than draft tokens. They
                may be changed.
            counts: int64 ``[n]``, draft tokens of each request.
            drafts: int32 ``[m]``.
            sampling_metadata: the requests' parameters, as :func:`is_plain` allows them.
        """
        logits, scales = logits.to(torch.float32), _scales(sampling_metadata, len(counts))
        if sampling_metadata.top_k is not None or sampling_metadata.top_p is not None:
            ends = torch.from_numpy((counts + 1).cumsum())
            logits = rejection_sampler.apply_sampling_constraints(logits, ends, sampling_metadata)
            scales = np.sign(scales)
        randoms = _randoms(counts + 1, sampling_metadata)
        found = self._verifier.verify(logits.numpy(), counts, drafts.numpy(), scales, randoms)
        return torch.from_numpy(found)

    def rejection_sample(
        self,
        draft_token_ids: torch.Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_logits: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        **unused: Any,
    ) -> torch.Tensor:
        """vLLM's function of this name; the tokens after the drafts are given.

        Args:
            draft_token_ids: int32 ``[m]``.
            num_draft_tokens: n draft lengths.
            max_spec_len: unused.
            cu_num_draft_tokens: unused.
            draft_probs: unused; the hook's drafts have none.
            target_logits: float32 ``[m, vocab_size]``, after all of the requests' parameters.
            bonus_token_ids: ``[n, 1]``, sampled after each draft's last token.
            sampling_metadata: the requests' parameters.
            unused: arguments for vLLM's own drafts.
        """
        counts = np.array(num_draft_tokens)
        scales = np.sign(_scales(sampling_metadata, len(counts)))
        bonus = bonus_token_ids[:, 0].numpy().astype(np.int64)
        logits, drafts = target_logits.numpy(), draft_token_ids.numpy()
        randoms = _randoms(counts, sampling_metadata)
        return torch.from_numpy(
            self._verifier.verify(logits, counts, drafts, scales, randoms, bonus)
        )


def _scales(sampling_metadata: SamplingMetadata, num_requests: int) -> Float32Array:
    """float32 ``[n]``: factors of the requests' logits; 0 for greedy requests."""
    scales = np.zeros(num_requests, np.float32)
    if not sampling_metadata.all_greedy:
        assert sampling_metadata.temperature is not None
        temperatures = sampling_metadata.temperature.numpy()
        np.divide(1.0, temperatures, out=scales, where=temperatures != GREEDY_TEMPERATURE)
    return scales


def _randoms(counts: Int64Array, sampling_metadata: SamplingMetadata) -> Float64Array:
    """float64 ``[sum(counts)]``: random numbers, from the requests' own generators if any."""
    num_rows = int(counts.sum())
    if sampling_metadata.all_greedy:
        return np.zeros(num_rows)
    drawn: Float64Array = rejection_sampler.generate_uniform_probs(
        num_rows, counts.tolist(), sampling_metadata.generators, torch.device("cpu")
    ).numpy()
    return drawn
