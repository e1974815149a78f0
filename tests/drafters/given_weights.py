"""Weights of a module of transformers, under the names of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config


class GivenWeights:
    """At the seam where a layer gets its weights from; ``specserve`` reads them from files."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._tensors[name]
        assert tensor.shape == shape
        return tensor.to(dtype or tensor.dtype)


@torch.no_grad()
def randomise(module: nn.Module) -> None:
    """Weights far from any symmetry that could hide a mistake."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in module.state_dict().items():
        tensor.normal_(0, 1.5 * tensor.shape[-1] ** -0.5, generator=generator)
        if "norm" in name:
            tensor.add_(1)


def small_config(**changes: Any) -> Any:
    """A DeepSeek-V3 of small, different sizes."""
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
