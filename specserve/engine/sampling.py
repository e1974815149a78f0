"""Sampling under speculation, where vLLM does less than it could, or more than it must."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.torch_utils import PIN_MEMORY, async_tensor_h2d
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors


def repair_sampling(runner: Any) -> None:
    """Both repairs of this module, for the model runner of every rank.

    Every rank samples for itself: one that did otherwise would go on with other tokens.
    """
    restore_logits_processors(runner)
    sample_plainly_without_drafts(runner)


def restore_logits_processors(runner: Any) -> None:
    """Lets requests with ``min_p`` or ``logit_bias`` be served.

    Under speculation vLLM leaves both out, and refuses such requests. They work on rows without a
    draft, so these requests are decoded without drafts.
    """
    runner.input_batch.logitsprocs = LogitsProcessors(
        processor(runner.vllm_config, runner.device, PIN_MEMORY)
        for processor in BUILTIN_LOGITS_PROCESSORS
    )


def sample_plainly_without_drafts(runner: Any) -> None:
    """Takes a step in which no request has a draft as if there were no speculation.

    vLLM works out for every step which of its logits are whose drafts', and takes it through
    rejection sampling, which then accepts nothing of nothing: several times the work of sampling,
    for the same distribution.
    """
    calc_metadata, sample = runner._calc_spec_decode_metadata, runner._sample

    def _calc_spec_decode_metadata(num_draft_tokens: Any, ends: Any) -> Any:
        if num_draft_tokens.any():
            return calc_metadata(num_draft_tokens, ends)
        return _NoDrafts(async_tensor_h2d(ends - 1, device=runner.device))

    def _sample(logits: Any, spec_decode_metadata: Any) -> Any:
        if isinstance(spec_decode_metadata, _NoDrafts):
            spec_decode_metadata = None
        return sample(logits, spec_decode_metadata)

    runner._calc_spec_decode_metadata = _calc_spec_decode_metadata
    runner._sample = _sample


@dataclass(frozen=True, slots=True)
class _NoDrafts:
    """In the place of vLLM's ``SpecDecodeMetadata``, of which nothing else is needed then.

    Attributes:
        logits_indices: int32 ``[n]``, the last scheduled token of each request.
    """

    logits_indices: torch.Tensor
