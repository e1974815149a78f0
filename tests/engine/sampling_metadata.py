"""The sampling metadata of a step, as vLLM's samplers get it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata


def sampling_metadata(num_requests: int, **fields: Any) -> SamplingMetadata:
    """Metadata of greedy requests without other options."""
    none = torch.zeros(num_requests)
    return SamplingMetadata(
        **{
            "temperature": None,
            "all_greedy": True,
            "all_random": False,
            "top_p": None,
            "top_k": None,
            "generators": {},
            "max_num_logprobs": None,
            "no_penalties": True,
            "prompt_token_ids": None,
            "frequency_penalties": none,
            "presence_penalties": none,
            "repetition_penalties": none,
            "output_token_ids": [],
            "allowed_token_ids_mask": None,
            "bad_words_token_ids": {},
            "logitsprocs": LogitsProcessors(),
            **fields,
        }
    )
