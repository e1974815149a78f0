"""Emulates vLLM's quantization at load on x86 CPUs.

vLLM's kernels need AMX. For ``int8_per_channel_weight_only`` of experts it has no CPU kernel.

Weights are rounded to the values of vLLM's quantization, and stored and multiplied in the model's
dtype. Answers are those of quantized weights; memory and speed are those of unquantized ones. GPU
kernels, and AMX kernels for int8, also round activations. This module does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online import base
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    amax_for_moe_weight_quant,
    kFp8Static128BlockSym,
    kInt8StaticChannelSym,
    weight_amax,
)
from vllm.utils.deep_gemm import per_block_cast_to_fp8

_BLOCK = 128


def round_weights_instead(*, has_amx: bool) -> None:
    """Lets vLLM round the weights, in this process, where it has no kernel for this CPU."""
    linear: dict[Any, Any] = {}
    experts: dict[Any, Any] = {kInt8StaticChannelSym: RoundedInt8Experts}
    if not has_amx:
        linear[kFp8Static128BlockSym] = RoundedFp8Linear
        experts[kFp8Static128BlockSym] = RoundedFp8Experts
    base._ONLINE_LINEAR_METHODS = base._ONLINE_LINEAR_METHODS | linear
    base._ONLINE_MOE_METHODS = base._ONLINE_MOE_METHODS | experts


class RoundedFp8Linear(OnlineLinearBase):
    """``fp8_per_block`` of a linear layer."""

    activation_quant_key = None

    def __init__(self) -> None:
        """Must run within vLLM's current configuration, like vLLM's own methods."""
        super().__init__()
        self._plain = UnquantizedLinearMethod()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rounds ``layer.weight`` [out, in] and then prepares it like an unquantized one.

        vLLM calls it after reading the layer's weights, and again after reading all layers.
        """
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        layer.weight.data.copy_(rounded_to_fp8(layer.weight))
        self._plain.process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True

    def apply(
        self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` [..., in] times the weight: [..., out]."""
        product: torch.Tensor = self._plain.apply(layer, x, bias)
        return product


class RoundedFp8Experts(UnquantizedFusedMoEMethod):
    """``fp8_per_block`` of routed experts."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rounds each expert's weights before the kernel packs them."""
        for experts in (layer.w13_weight, layer.w2_weight):
            for weight in experts.data:
                weight.copy_(rounded_to_fp8(weight))
        super().process_weights_after_loading(layer)


class RoundedInt8Experts(UnquantizedFusedMoEMethod):
    """``int8_per_channel_weight_only`` of routed experts."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rounds each expert's weights before the kernel packs them."""
        gate_up, down = layer.w13_weight.data, layer.w2_weight.data
        gate_up.copy_(rounded_to_int8(gate_up, weight_amax(gate_up, dim=-1)))
        largest = amax_for_moe_weight_quant(weight_amax(down, dim=-1), self.moe.tp_size)
        down.copy_(rounded_to_int8(down, largest))  # shards split the rows
        super().process_weights_after_loading(layer)


def rounded_to_fp8(weight: torch.Tensor) -> torch.Tensor:
    """Rounds ``weight`` [out, in] to fp8 with a scale for each 128 x 128 block; float32."""
    values, scales = per_block_cast_to_fp8(weight.data, [_BLOCK, _BLOCK])
    spread = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    rounded: torch.Tensor = values.float() * spread[: values.shape[0], : values.shape[1]]
    return rounded


def rounded_to_int8(weight: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Rounds ``weight`` [..., out, in] to int8 with a scale for each row; float32.

    ``largest`` [..., out] is the largest absolute value of each row, over all shards.
    """
    scales = (largest.float() / 127).clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return (weight.float() / scales).round().clamp(-127, 127) * scales
