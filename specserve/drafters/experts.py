"""A mixture of experts as DeepSeek-V3 routes it (arXiv 2412.19437, section 2.1.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.drafters.mtp_weights import MtpWeights
from specserve.drafters.ops import laid_out


class MixtureOfExperts:
    """Shared experts for every token, and ``num_experts_per_tok`` routed ones for each.

    ``config`` is transformers' DeepseekV3Config.
    """

    def __init__(self, config: Any, weights: MtpWeights) -> None:
        width, inner = config.hidden_size, config.moe_intermediate_size
        count = config.n_routed_experts
        self._top_k = config.num_experts_per_tok
        self._num_groups, self._top_groups = config.n_group or 1, config.topk_group or 1
        self._normalized = config.norm_topk_prob
        self._scale = config.routed_scaling_factor
        # Routing depends on small differences, so it is float32 whatever the model's type.
        self._gate = weights.get("gate.weight", count, width, dtype=torch.float32)
        self._bias = weights.get("gate.e_score_correction_bias", count, dtype=torch.float32)
        self._shared = _Expert(weights, "shared_experts", width, inner * config.n_shared_experts)
        # Filled one by one, without a second copy: they are most of a large model.
        self._gate_up = self._shared.down.new_empty(count, width, 2 * inner)
        self._down = self._shared.down.new_empty(count, inner, width)
        for index in range(count):
            expert = _Expert(weights, f"experts.{index}", width, inner)
            self._gate_up[index] = expert.gate_up.t()
            self._down[index] = expert.down.t()

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, hidden_size]``, as ``x``."""
        weights, experts = self.route(x)
        out = self._shared.forward(x)
        pairs, order = experts.flatten().sort(stable=True)
        tokens = order // self._top_k
        numbers = torch.arange(len(self._down), device=x.device)
        ends = torch.searchsorted(pairs, numbers, right=True, out_int32=True)
        mixed = F.grouped_mm(x[tokens], self._gate_up, offs=ends)
        gate, up = mixed.chunk(2, -1)
        mixed = F.grouped_mm(F.silu(gate).mul_(up), self._down, offs=ends)
        mixed = torch.empty_like(mixed).index_copy_(0, order, mixed)
        mixed = mixed.view(len(x), self._top_k, -1)
        return torch.baddbmm(out.unsqueeze(1), weights.unsqueeze(1), mixed).squeeze(1)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses the experts of each token.

        A load-balancing bias changes the choice but not the weights. Only experts of the best
        groups can be chosen; a group's score is the sum of its two best experts.

        Returns:
            weights, in ``x``'s type, and experts, int64; both ``[tokens, num_experts_per_tok]``.
        """
        scores = F.linear(x.float(), self._gate).sigmoid()
        choice = scores + self._bias
        if self._num_groups > 1:
            groups = choice.view(len(x), self._num_groups, -1)
            best = groups.topk(2, -1).values.sum(-1).topk(self._top_groups, -1).indices
            masked = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
            choice = groups.masked_fill(masked.unsqueeze(-1), -torch.inf).flatten(1)
        experts = choice.topk(self._top_k, -1).indices
        weights = scores.gather(1, experts)
        if self._normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * self._scale).to(x.dtype), experts


class _Expert:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: MtpWeights, name: str, width: int, inner: int) -> None:
        gate = weights.get(f"{name}.gate_proj.weight", inner, width)
        up = weights.get(f"{name}.up_proj.weight", inner, width)
        self.gate_up = laid_out(torch.cat([gate, up]))
        self.down = laid_out(weights.get(f"{name}.down_proj.weight", width, inner))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), self.down)
