from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers import utils

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker wants to be imported first
from specserve.engine.cpu import linear


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)


def test_products_are_rounded_once_where_the_cpu_has_no_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "has_bfloat16_arithmetic", lambda: False)
    linear.use_float32_linear()
    layer = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    x = torch.randn(5, 64).bfloat16()
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert not layer.weight.numel()
    found = utils.cpu_unquantized_gemm(layer, x, layer.weight, layer.bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


def test_layers_that_vllm_leaves_to_torch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_bfloat16_arithmetic", lambda: False)
    left_to_torch, other = (torch.nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(2))
    exact, packed = torch.nn.Linear(4, 4), torch.nn.Identity()
    for layer in (left_to_torch, exact, packed):
        vars(layer)["_cpu_skip_gemm_dispatch"] = True
    linear.use_float32_linear_in(torch.nn.Sequential(left_to_torch, other, exact, packed))
    assert hasattr(left_to_torch, "cpu_linear")
    assert not any(hasattr(layer, "cpu_linear") for layer in (other, exact, packed))


def test_a_cpu_that_has_bfloat16_keeps_vllms_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_bfloat16_arithmetic", lambda: True)
    before = utils.dispatch_cpu_unquantized_gemm
    linear.use_float32_linear()
    assert utils.dispatch_cpu_unquantized_gemm is before
