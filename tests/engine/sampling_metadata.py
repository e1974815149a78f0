"""What vLLM's samplers get in a step, and the CPU kernels that they run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker must be imported first
from specserve.engine.cpu.kernels import repair_kernels
from specserve.engine.cpu.verification import sample_by_drawing, verify_by_drawing


def install_cpu_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs vLLM's CPU kernel and our sampling, as the CPU workers do, until the test ends."""
    for name in ("apply_top_k_top_p", "expand_batch_to_tokens"):
        monkeypatch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
    repair_kernels()
    launcher = rejection_sampler._rejection_greedy_sample
    kernel = KernelOverride(launcher.kernel, cpu_triton_utils._rejection_greedy_sample_kernel_impl)
    monkeypatch.setattr(launcher, "kernel", kernel)
    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sampler.rejection_sample)
    for sampler in (RejectionSampler, Sampler):
        monkeypatch.setattr(sampler, "forward", sampler.forward)
    verify_by_drawing()
    sample_by_drawing()


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


def drafts_metadata(drafts: Sequence[Sequence[int]]) -> SpecDecodeMetadata:
    """vLLM's layout of a step's logits: each request's draft tokens, then its bonus token."""
    num_drafts = [len(draft) for draft in drafts]
    ends = torch.tensor([n + 1 for n in num_drafts]).cumsum(0)
    bonus = (ends - 1).tolist()
    return SpecDecodeMetadata(
        draft_token_ids=torch.tensor([*chain(*drafts)], dtype=torch.int32),
        num_draft_tokens=num_drafts,
        cu_num_draft_tokens=torch.tensor(num_drafts).cumsum(0).to(torch.int32),
        cu_num_sampled_tokens=ends.to(torch.int32),
        target_logits_indices=torch.tensor([i for i in range(int(ends[-1])) if i not in bonus]),
        bonus_logits_indices=torch.tensor(bonus),
        logits_indices=torch.arange(int(ends[-1])),
    )
