"""vLLM's profile of GPU memory, by its own dummy run on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specserve.engine.gpu_worker import GpuSpeculationWorker
from specserve.engine.sampler import IndependentRejectionSampler, IndependentSampler
from specserve.engine.worker import SpeculationMixin
from tests.engine.sampling_metadata import install_cpu_sampling

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="run by vLLM's CPU kernels")

VOCAB_SIZE = 50


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs the CPU kernels that the CPU workers install, and compiles nothing."""
    install_cpu_sampling(monkeypatch)
    with torch.compiler.set_stance("force_eager"):
        yield


class Recording(IndependentRejectionSampler):
    """The workers' rejection sampler, which notes what it is called with."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: Any,
    ) -> Any:
        output = super().forward(metadata, draft_probs, logits, sampling_metadata)
        longest = max(metadata.num_draft_tokens)
        assert output.sampled_token_ids.shape == (len(metadata.num_draft_tokens), longest + 1)
        self.calls.append((metadata, logits, sampling_metadata.all_greedy))
        return output


def model_runner(num_requests: int, num_tokens: int, longest: int) -> Any:
    """The part of vLLM's model runner that runs the samplers."""
    speculation = SimpleNamespace(rejection_sample_method="standard", draft_sample_method="greedy")
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None)),
        model=SimpleNamespace(compute_logits=lambda states: states.to(torch.bfloat16)),
        device=torch.device("cpu"),
        sampler=IndependentSampler(),
        speculative_config=speculation,
        max_num_reqs=num_requests,
        max_num_tokens=num_tokens,
        num_spec_tokens=longest,
    )
    runner.rejection_sampler = Recording(runner.sampler, speculation, runner.device)
    runner.rejection_sampler.calls = []
    runner._dummy_sampler_run = lambda hidden_states: GPUModelRunner._dummy_sampler_run(
        runner, hidden_states
    )
    return runner


@pytest.mark.parametrize(
    ("num_requests", "num_tokens", "longest", "most"),
    [
        (4, 1000, 16, 64),  # each request has the longest draft
        (8, 85, 16, 80),  # 5 requests with the longest drafts are a whole step
        (8, 86, 16, 80),  # a sixth one has no room for a draft
        (8, 87, 16, 81),
        (3, 8, 2, 5),  # 3 requests with 2, 2 and 1
        (8, 8, 1, 4),  # fewer draft tokens than requests
    ],
)
def test_the_profile_verifies_the_most_draft_tokens_of_a_step(
    num_requests: int, num_tokens: int, longest: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    worker = object.__new__(GpuSpeculationWorker)

    def init_device(self: Any) -> None:
        self.model_runner = model_runner(num_requests, num_tokens, longest)

    monkeypatch.setattr(SpeculationMixin, "init_device", init_device)
    worker.init_device()
    runner: Any = worker.model_runner
    sampler = runner.rejection_sampler
    output = runner._dummy_sampler_run(torch.zeros(num_requests, VOCAB_SIZE))
    assert output.sampled_token_ids.shape == (num_requests, 1)
    assert [all_greedy for _, _, all_greedy in sampler.calls] == [False, True]
    for metadata, logits, _ in sampler.calls:
        assert len(metadata.num_draft_tokens) == num_requests
        assert sum(metadata.num_draft_tokens) == len(metadata.draft_token_ids) == most
        assert max(metadata.num_draft_tokens) <= longest
        assert len(metadata.target_logits_indices) == most
        assert logits.shape == (most + num_requests, VOCAB_SIZE)
        assert logits.dtype == torch.bfloat16
    assert runner.rejection_sampler is sampler
