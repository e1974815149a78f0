from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from vllm.model_executor.layers import utils

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker must be imported first
from specserve.engine.cpu import linear


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)


def test_products_in_float32_are_rounded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "is_float32_faster", lambda *_: True)
    linear.use_fastest_linear()
    layer = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    x = torch.randn(5, 64).bfloat16()
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert not layer.weight.numel()
    found = utils.cpu_unquantized_gemm(layer, x, layer.weight, layer.bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


def test_layers_that_vllm_leaves_to_torch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_float32_faster", lambda *_: True)
    left_to_torch, other = (torch.nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(2))
    exact, packed = torch.nn.Linear(4, 4), torch.nn.Identity()
    for layer in (left_to_torch, exact, packed):
        vars(layer)["_cpu_skip_gemm_dispatch"] = True
    linear.use_fastest_linear_in(torch.nn.Sequential(left_to_torch, other, exact, packed))
    assert hasattr(left_to_torch, "cpu_linear")
    assert not any(hasattr(layer, "cpu_linear") for layer in (other, exact, packed))


@pytest.mark.parametrize(("seconds", "is_faster"), [((1, 2, 1, 2), True), ((2, 1, 1, 2), False)])
def test_float32_is_chosen_if_decode_plus_prefill_is_faster(
    seconds: tuple[int, ...], is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``seconds``: decode in float32 and in bfloat16, then prefill in both."""
    of_rows = iter([seconds[:2], seconds[2:]])

    def take(*calls: Callable[[], torch.Tensor]) -> tuple[int, ...]:
        assert len({call().shape for call in calls}) == 1
        return next(of_rows)

    monkeypatch.setattr(linear, "_seconds", take)
    linear.is_float32_faster.cache_clear()
    found = linear.is_float32_faster(64, 32, linear._dispatch)
    assert found is is_faster
    assert linear.is_float32_faster(64, 32, linear._dispatch) is found  # measured once
    linear.is_float32_faster.cache_clear()


def test_a_layer_is_measured_by_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_MEASURED_S", 0.0)

    def waits() -> None:
        time.sleep(0.01)  # as when another process has the CPU

    def computes() -> None:
        until = time.thread_time() + 0.005
        while time.thread_time() < until:
            pass

    waited, computed = linear._seconds(waits, computes)
    assert waited < 0.005 <= computed


def test_vllm_chooses_its_kernel_if_bfloat16_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_float32_faster", lambda *_: False)
    asked: list[bool] = []
    monkeypatch.setattr(linear, "_dispatch", lambda _, remove_weight: asked.append(remove_weight))
    linear.use_fastest_linear()
    utils.dispatch_cpu_unquantized_gemm(torch.nn.Linear(4, 4, dtype=torch.bfloat16), True)
    assert asked == [True]
