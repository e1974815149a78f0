"""Random weights of a transformers module, under a checkpoint's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config


class GivenWeights:
    """Gives a layer these tensors in place of weights from files."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        first = next(iter(tensors.values()))
        self.dtype, self.device = first.dtype, first.device

    def part(self, name: str) -> GivenWeights:
        prefix = f"{name}."
        return GivenWeights(
            {
                each.removeprefix(prefix): tensor
                for each, tensor in self._tensors.items()
                if each.startswith(prefix)
            }
        )

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._tensors[name]
        assert tensor.shape == shape
        return tensor.to(dtype or tensor.dtype)


@torch.no_grad()
def randomise(module: nn.Module) -> None:
    """Sets random weights, so that no symmetry hides a mistake."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in module.state_dict().items():
        tensor.normal_(0, 1.5 * tensor.shape[-1] ** -0.5, generator=generator)
        if "norm" in name:
            tensor.add_(1)


def small_config(**changes: Any) -> Any:
    """A DeepSeek-V3 config of small sizes."""
    options: dict[str, Any] = {
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "kv_lora_rank": 20,
        "q_lora_rank": 28,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
        "moe_intermediate_size": 16,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096,
    }
    return DeepseekV3Config(**options | changes)
