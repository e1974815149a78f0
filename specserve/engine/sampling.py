"""Sampling under speculation, where vLLM does less than it could, or more than it must."""

from __future__ import annotations

from typing import Any

from vllm.utils.torch_utils import PIN_MEMORY
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
    """Samples a step in which no request has a draft as if there were no speculation.

    vLLM takes every step through rejection sampling, which then accepts nothing of nothing: several
    times the work of sampling, for the same distribution.
    """
    sample = runner._sample

    def _sample(logits: Any, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            spec_decode_metadata = None
        return sample(logits, spec_decode_metadata)

    runner._sample = _sample
