"""transformers' mixture of experts with the weights of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from specserve.drafters.experts import mixture_of_experts
from tests.drafters.given_weights import GivenWeights, randomise, small_config


def both(config: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The layer with a checkpoint's weights in ``dtype``, and the one that they come from."""
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
    return mixture_of_experts(config, given), theirs


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
def test_each_tensor_of_the_checkpoint_has_its_place(
    changes: dict[str, Any], num_tokens: int
) -> None:
    ours, theirs = both(small_config(**changes))
    x = torch.randn(num_tokens, 48, generator=torch.Generator().manual_seed(1))
    expected = theirs(x)
    assert torch.allclose(ours(x), expected, atol=1e-5)
    assert expected.std() > 0.1


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_half_precision_computes_nearly_the_same(num_tokens: int, dtype: torch.dtype) -> None:
    config = small_config()
    (exact, _), (ours, _) = both(config), both(config, dtype)
    x = torch.randn(num_tokens, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, expected = ours(x), exact(x.float())
    assert found.dtype == dtype
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_routing_is_computed_in_float32() -> None:
    ours, _ = both(small_config(), torch.bfloat16)
    assert {tensor.dtype for tensor in ours.gate.state_dict().values()} == {torch.float32}
