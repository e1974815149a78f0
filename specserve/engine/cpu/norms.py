"""RMS norm on CPU by vLLM's kernels.

vLLM 0.32 does not register its CPU kernels with its dispatcher, which runs about eight torch
operations instead.
"""

from __future__ import annotations

import torch
from vllm import ir
from vllm.kernels import vllm_c

PROVIDER = "specserve_cpu"
"""Name of the kernels among vLLM's implementations of a norm."""

_VECTOR = 16
"""Row widths must be a multiple of this; the kernels process 16 or 8 numbers at a time."""


def use_norm_kernels() -> None:
    """Lets vLLM run its CPU norm kernels in this process, for arguments that they support."""
    if PROVIDER not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_fits)(_rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_both_fit, inplace=True)(
            vllm_c.fused_add_rms_norm.impl_fn
        )
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        op.set_default([PROVIDER, "native"])


def _fits(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    is_plain = weight is not None and weight.dtype == x.dtype and variance_size is None
    return is_plain and x.shape[-1] % _VECTOR == 0


def _both_fit(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    is_in_place = x.is_contiguous() and x_residual.is_contiguous()
    return is_in_place and _fits(x, weight, epsilon, variance_size)


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor:
    x = x.contiguous()
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output
