"""A mixture of experts as DeepSeek-V3 routes it (arXiv 2412.19437, section 2.1.2)."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from specserve.drafters.mtp_weights import MtpWeights


def mixture_of_experts(config: Any, weights: MtpWeights) -> DeepseekV3MoE:
    """transformers' layer with these weights, for ``[tokens, hidden_size]``.

    Routing depends on small differences, so it is float32 whatever the model's type. ``config`` is
    transformers' DeepseekV3Config.
    """
    config = copy(config)
    config.n_group, config.topk_group = config.n_group or 1, config.topk_group or 1
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        layer = DeepseekV3MoE(config)
    tensors = {}
    for name, empty in layer.state_dict().items():
        if name.startswith("experts."):
            tensors[name] = torch.empty(empty.shape, dtype=weights.dtype, device=weights.device)
        else:
            dtype = torch.float32 if name.startswith("gate.") else weights.dtype
            tensors[name] = weights.get(name, *empty.shape, dtype=dtype)
    width, inner = config.hidden_size, config.moe_intermediate_size
    # Filled one by one, without a second copy: they are most of a large model.
    for index in range(config.n_routed_experts):
        expert = weights.part(f"experts.{index}")
        gate_up, down = (tensors[f"experts.{name}_proj"][index] for name in ("gate_up", "down"))
        gate_up[:inner] = expert.get("gate_proj.weight", inner, width)
        gate_up[inner:] = expert.get("up_proj.weight", inner, width)
        down[:] = expert.get("down_proj.weight", width, inner)
    layer.load_state_dict(tensors, assign=True)
    return layer.requires_grad_(False)
