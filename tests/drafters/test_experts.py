"""Our mixture of experts against that of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from specserve.drafters.experts import MixtureOfExperts
from tests.drafters.given_weights import GivenWeights, randomise, small_config


def both(config: Any, dtype: torch.dtype = torch.float32) -> tuple[MixtureOfExperts, Any]:
    """Our layer in ``dtype`` and transformers' layer, with the same weights."""
    theirs = DeepseekV3MoE(config).eval()
    randomise(theirs)
    tensors: dict[str, Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        if name == "experts.gate_up_proj":
            for index, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                tensors[f"experts.{index}.gate_proj.weight"] = gate
                tensors[f"experts.{index}.up_proj.weight"] = up
        elif name == "experts.down_proj":
            for index, expert in enumerate(tensor):
                tensors[f"experts.{index}.down_proj.weight"] = expert
        else:
            tensors[name] = tensor
    given: Any = GivenWeights({name: tensor.to(dtype) for name, tensor in tensors.items()})
    return MixtureOfExperts(config, given), theirs


@torch.inference_mode()
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False},
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0},
        {"topk_group": 4, "num_experts_per_tok": 12},
    ],
)
def test_experts_are_chosen_weighted_and_mixed_as_in_transformers(
    changes: dict[str, Any], num_tokens: int
) -> None:
    ours, theirs = both(small_config(**changes))
    x = torch.randn(num_tokens, 48, generator=torch.Generator().manual_seed(1))
    expected = theirs(x)
    assert torch.allclose(ours.forward(x), expected, atol=1e-5)
    assert expected.std() > 0.1


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_half_precision_computes_nearly_the_same(num_tokens: int, dtype: torch.dtype) -> None:
    config = small_config()
    (exact, _), (ours, _) = both(config), both(config, dtype)
    x = torch.randn(num_tokens, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, expected = ours.forward(x), exact.forward(x.float())
    assert found.dtype == dtype
    assert (found - expected).norm() < 0.02 * expected.norm()


@torch.inference_mode()
def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    ours, theirs = both(small_config(n_group=1, topk_group=1, num_experts_per_tok=2))
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(1))
    theirs.gate.e_score_correction_bias.zero_()[5] = 10
    weights, experts = ours.route(x)
    assert (experts[:, 0] == 5).all()
    scores = (x @ theirs.gate.weight.T).sigmoid().gather(1, experts)
    assert torch.allclose(weights, 2.5 * scores / scores.sum(1, keepdim=True))


@torch.inference_mode()
def test_weights_have_the_type_of_the_input() -> None:
    ours, _ = both(small_config())
    weights, _ = ours.route(torch.randn(3, 48).bfloat16())
    assert weights.dtype == torch.bfloat16
