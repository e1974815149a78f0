from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._inductor import config as inductor
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker must be imported first
from specserve.engine.cpu.kernels import repair_kernels, unused_generators_aside


@pytest.mark.skipif(HAS_TRITON, reason="with Triton the original kernel runs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_draft_token_gets_the_value_of_its_request(dtype: torch.dtype) -> None:
    repair_kernels()
    values = torch.tensor([3, 0, 5], dtype=dtype)
    cumulative = torch.tensor([2, 3, 3], dtype=torch.int32)  # 2, 1 and 0 draft tokens
    expanded = rejection_sampler.expand_batch_to_tokens(
        values, cumulative, 3, replace_from=0, replace_to=1
    )
    assert expanded.dtype == dtype
    assert expanded.tolist() == [3, 3, 1]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="the replacement is for CPUs")
def test_top_k_accepts_a_step_without_drafts() -> None:
    repair_kernels()
    none = torch.zeros((0, 8))
    top_k = torch.zeros(0, dtype=torch.int32)
    assert rejection_sampler.apply_top_k_top_p(none, top_k, None).shape == (0, 8)
    kept = rejection_sampler.apply_top_k_top_p(
        torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([1]), None
    )
    assert kept.isfinite().tolist() == [[False, True, False]]


def test_log_probabilities_are_ranked_without_a_compiler() -> None:
    scores = torch.tensor([[-1.0, -0.5, -3.0], [-2.0, -2.0, -0.3]])
    no_compiler = inductor.patch({"cpp.cxx": ("/nonexistent/g++",)})
    with no_compiler, torch.compiler.set_stance("force_eager"):  # as a CPU worker sets it
        found = Sampler.gather_logprobs(scores, 1, torch.tensor([0, 1]))
    assert found.selected_token_ranks.tolist() == [2, 3]


class Sampled(Exception):
    """Raised after vLLM has handled the generators."""


class SamplerOutput:
    @property
    def sampled_token_ids(self) -> torch.Tensor:
        raise Sampled


def test_a_seeded_request_keeps_its_generator_during_prefill() -> None:
    generators = {row: torch.Generator().manual_seed(row) for row in (0, 2)}
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(
            num_reqs=3, generators=dict(generators), req_ids=[], req_id_to_index={}
        ),
        # Entries after the last request belong to an earlier step.
        discard_request_mask=SimpleNamespace(np=np.array([False, True, True, True])),
    )
    with unused_generators_aside(runner):
        assert runner.input_batch.generators == {0: generators[0]}
        with pytest.raises(Sampled):
            GPUModelRunner._bookkeeping_sync(runner, None, SamplerOutput(), None, None, 0)
    assert runner.input_batch.generators == generators
