from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.platforms import current_platform

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker must be imported first
from specserve.engine.cpu.experts import allow_float32_experts

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="replaced on CPU only")

TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN = 7, 8, 6, 5, 2


@pytest.mark.parametrize("weighted_before", [False, True])
def test_a_tokens_output_is_the_weighted_sum_of_its_experts(weighted_before: bool) -> None:
    allow_float32_experts()
    torch.manual_seed(0)
    hidden, output = torch.randn(TOKENS, HIDDEN), torch.full((TOKENS, HIDDEN), 9.0)
    w1, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    ids = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, CHOSEN)
    CPUUnquantizedExperts.apply(
        cast(Any, None),
        output=output,
        hidden_states=hidden,
        w1=w1,
        w2=w2,
        topk_weights=weights,
        topk_ids=ids,
        activation=MoEActivation.SILU,
        apply_router_weight_on_input=weighted_before,
    )
    for token in range(TOKENS):
        expected = torch.zeros(HIDDEN)
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = w1[expert, :INNER] @ hidden[token], w1[expert, INNER:] @ hidden[token]
            answer = w2[expert] @ (functional.silu(gate) * up)
            expected += answer if weighted_before else weight * answer
        torch.testing.assert_close(output[token], expected, rtol=1e-4, atol=1e-4)
