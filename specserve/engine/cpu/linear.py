"""Linear layers on CPUs without bfloat16 arithmetic.

Without AVX512-BF16, AMX or Arm's BF16, matrix products in bfloat16 are slower than in float32. Here
linear layers keep their weights in float32, twice the memory, and round the result once, as
bfloat16 hardware does. Latent attention and a separate output head keep their bfloat16 weights
beside them, which others read too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

_dispatch = utils.dispatch_cpu_unquantized_gemm


def use_float32_linear() -> None:
    """Has vLLM's linear layers compute so in this process, where the CPU needs it."""
    if not has_bfloat16_arithmetic():
        utils.dispatch_cpu_unquantized_gemm = _dispatch_float32


def use_float32_linear_in(model: torch.nn.Module) -> None:
    """The same for the loaded layers that vLLM leaves to torch: those of latent attention."""
    if not has_bfloat16_arithmetic():
        for layer in model.modules():
            if getattr(layer, "_cpu_skip_gemm_dispatch", False):
                weight = getattr(layer, "weight", None)
                if isinstance(weight, torch.Tensor) and _is_concerned(weight):
                    _compute_in_float32(layer, weight)


def has_bfloat16_arithmetic() -> bool:
    """Whether the CPU multiplies bfloat16 numbers itself (x86: AVX512-BF16 or AMX; Arm: BF16)."""
    return bool(
        torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
        or torch.cpu.get_capabilities().get("bf16", False)
    )


def _dispatch_float32(layer: Any, remove_weight: bool) -> None:
    """vLLM's function of this name: chooses how a layer computes."""
    is_lookup = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    if is_lookup or not _is_concerned(layer.weight):
        _dispatch(layer, remove_weight)
        return
    _compute_in_float32(layer, layer.weight)
    if remove_weight:
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


def _is_concerned(weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and weight.dtype == torch.bfloat16 and not weight.is_meta


def _compute_in_float32(layer: Any, weight: torch.Tensor) -> None:
    layer.cpu_linear = partial(_linear, weight.detach().float())


def _linear(
    weight: torch.Tensor, x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x`` [..., in] times ``weight`` [out, in] in float32, in the type of ``x``."""
    in_float32 = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight, in_float32).to(x.dtype)
