from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import ir

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker must be imported first
from specserve.engine.cpu.norms import PROVIDER, use_norm_kernels

EPSILON = 1e-6
ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def _in_place() -> Iterator[None]:
    native = ["native"]
    with ir.ops.rms_norm.set_priority(native), ir.ops.fused_add_rms_norm.set_priority(native):
        use_norm_kernels()
        yield


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm in float64."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight.double()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(1, 16), (5, 256), (2, 3, 48), (0, 16)])
def test_a_norm_has_its_dtypes_precision(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
    assert ir.ops.rms_norm.dispatch(x, weight, EPSILON).provider == PROVIDER
    found = ir.ops.rms_norm(x, weight, EPSILON)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact(x, weight), rtol=ROUNDING[dtype], atol=1e-6)


def test_a_slice_of_each_row_is_normalised() -> None:
    rows, weight = torch.randn(4, 80), torch.rand(64)
    part = rows[:, :64]
    found = ir.ops.rms_norm(part, weight, EPSILON)
    torch.testing.assert_close(found.double(), exact(part, weight), rtol=2**-20, atol=1e-6)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_norm_adds_to_the_residual_in_place(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(3, 32), torch.randn(3, 32), torch.rand(32)
    x, residual, weight = (each.to(dtype) for each in (x, residual, weight))
    total = x.double() + residual.double()
    normed, summed = ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, weight, EPSILON)
    assert (normed.data_ptr(), summed.data_ptr()) == (x.data_ptr(), residual.data_ptr())
    rtol = 2 * ROUNDING[dtype]
    torch.testing.assert_close(summed.double(), total, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(normed.double(), exact(total, weight), rtol=rtol, atol=1e-6)


def test_torch_computes_what_the_kernels_do_not_support() -> None:
    x, weight = torch.randn(3, 32), torch.rand(32)
    others: list[tuple[Any, ...]] = [
        (x, None, EPSILON),
        (x, weight.bfloat16(), EPSILON),
        (x, weight, EPSILON, 16),
        (torch.randn(3, 20), torch.rand(20), EPSILON),
    ]
    for args in others:
        assert ir.ops.rms_norm.dispatch(*args).provider == "native"
        assert ir.ops.rms_norm(*args).shape == args[0].shape
    apart = torch.randn(3, 64)[:, :32]
    assert ir.ops.fused_add_rms_norm.dispatch(apart, x, weight, EPSILON).provider == "native"
