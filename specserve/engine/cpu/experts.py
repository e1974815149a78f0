"""Experts in float32 on CPU, which vLLM's kernel refuses.

Computed in plain torch, one expert at a time. This serves exact comparisons of a mixture-of-experts
model with a reference; it is slow. For other dtypes vLLM's kernel runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_prepare = CPUUnquantizedExperts.process_weights_after_loading
_apply = CPUUnquantizedExperts.apply
_ARGUMENTS = ("output", "w1", "w2", "topk_weights", "topk_ids", "apply_router_weight_on_input")
"""Names of vLLM's arguments that the float32 experts need."""


def allow_float32_experts() -> None:
    """Lets vLLM's CPU experts run in float32 too, in this process."""
    CPUUnquantizedExperts.process_weights_after_loading = _prepare_or_leave
    CPUUnquantizedExperts.apply = _apply_in_any_type


def _prepare_or_leave(self: Any, layer: Any) -> None:
    if layer.w13_weight.dtype != torch.float32:
        _prepare(self, layer)
        return
    activation, has_bias = self.moe_config.activation, hasattr(layer, "w13_bias")
    if activation != MoEActivation.SILU or has_bias:
        raise ValueError(
            f"experts in float32 on CPU: activation {activation.value}, bias {has_bias}; "
            "allowed: silu, without bias"
        )


def _apply_in_any_type(self: Any, *, hidden_states: torch.Tensor, **rest: Any) -> None:
    """Replaces vLLM's method ``apply``, which is called with keyword arguments."""
    if hidden_states.dtype == torch.float32:
        arguments = {name: rest[name] for name in _ARGUMENTS}
        _apply_in_float32(hidden_states=hidden_states, **arguments)
    else:
        _apply(self, hidden_states=hidden_states, **rest)


# An operator of its own, since torch's compiler cannot trace a loop over the chosen experts.
@torch.library.custom_op("specserve::float32_experts", mutates_args=("output",))
def _apply_in_float32(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    apply_router_weight_on_input: bool,
) -> None:
    """Computes experts with SiLU between their projections; loading has checked this.

    Args:
        output: ``[tokens, hidden_size]``, overwritten with the result.
        hidden_states: ``[tokens, hidden_size]``.
        w1: ``[experts, 2 * intermediate_size, hidden_size]``, gate and up projections.
        w2: ``[experts, hidden_size, intermediate_size]``, down projections.
        topk_weights: ``[tokens, experts a token]``.
        topk_ids: the same shape.
        apply_router_weight_on_input: whether the weights are in ``hidden_states`` already.
    """
    output.zero_()
    for expert in sorted(set(topk_ids.flatten().tolist())):
        tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
        answer = functional.linear(functional.silu(gate) * up, w2[expert])
        if not apply_router_weight_on_input:
            answer = answer * topk_weights[tokens, slots, None]
        output.index_add_(0, tokens, answer)
