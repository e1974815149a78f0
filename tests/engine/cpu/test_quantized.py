from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online import base
from vllm.model_executor.layers.quantization.online.int8 import Int8OnlineMoEMethod

from specserve.engine.cpu.quantized import (
    RoundedFp8Experts,
    RoundedFp8Linear,
    RoundedInt8Experts,
    round_weights_instead,
    rounded_to_fp8,
    rounded_to_int8,
)

EXPERTS, INNER, HIDDEN = 3, 130, 140


def layer() -> Any:
    """Routed experts as vLLM loads them. One row of the second expert is zero."""
    torch.manual_seed(0)
    gate_up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    gate_up[1, 5] = 0
    loaded: Any = torch.nn.Module()
    loaded.w13_weight = torch.nn.Parameter(gate_up, requires_grad=False)
    loaded.w2_weight = torch.nn.Parameter(down, requires_grad=False)
    loaded.num_experts = loaded.local_num_experts = EXPERTS
    return loaded


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layers whose kernels have been set up."""
    layers: list[Any] = []
    monkeypatch.setattr(
        UnquantizedFusedMoEMethod,
        "process_weights_after_loading",
        lambda self, packed: layers.append(packed),
    )
    return layers


@pytest.mark.parametrize(
    ("quantization", "layer_class", "method"),
    [
        ("fp8_per_block", RowParallelLinear, RoundedFp8Linear),
        ("fp8_per_block", RoutedExperts, RoundedFp8Experts),
        ("int8_per_channel_weight_only", RoutedExperts, RoundedInt8Experts),
    ],
)
@pytest.mark.parametrize("has_amx", [False, True])
def test_vllm_resolves_the_quantization_to_our_rounding(
    monkeypatch: pytest.MonkeyPatch,
    quantization: str,
    layer_class: type,
    method: type,
    has_amx: bool,
) -> None:
    for table in ("_ONLINE_LINEAR_METHODS", "_ONLINE_MOE_METHODS"):
        monkeypatch.setattr(base, table, getattr(base, table))  # restored after the test
    round_weights_instead(has_amx=has_amx)
    arguments = resolve_quantization_config(quantization, None)
    assert arguments is not None
    found = base.OnlineQuantizationConfig(arguments).resolve_quant_method_cls(layer_class, "a")
    assert found is not None
    is_ours = not has_amx or method is RoundedInt8Experts
    assert (found[-1] is method) == is_ours


def test_experts_get_the_values_of_vllms_int8(packed: list[Any]) -> None:
    rounded, expected = layer(), layer()
    method = SimpleNamespace(moe=SimpleNamespace(tp_size=1))
    quantized = object.__new__(RoundedInt8Experts)
    torch.nn.Module.__init__(quantized)
    quantized.moe = method.moe
    quantized.process_weights_after_loading(rounded)
    Int8OnlineMoEMethod._quantize_weights(cast(Any, method), expected)
    for name, scale in (("w13_weight", "w13_scale"), ("w2_weight", "w2_scale")):
        by_vllm = getattr(expected, name) * getattr(expected, scale)[..., None]
        torch.testing.assert_close(getattr(rounded, name).data, by_vllm)
    assert packed == [rounded]


def test_each_expert_is_rounded_to_fp8_separately(packed: list[Any]) -> None:
    rounded, loaded = layer(), layer()
    quantized = object.__new__(RoundedFp8Experts)
    quantized.process_weights_after_loading(rounded)
    for name in ("w13_weight", "w2_weight"):
        for got, weight in zip(getattr(rounded, name), getattr(loaded, name), strict=True):
            assert torch.equal(got, rounded_to_fp8(weight))
            assert not torch.equal(got, weight)
    assert packed == [rounded]


def test_a_linear_layer_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    method = object.__new__(RoundedFp8Linear)
    method._plain = UnquantizedLinearMethod()
    linear: Any = torch.nn.Linear(140, 130, bias=False)
    linear.requires_grad_(False)
    # Latent attention keeps this weight as it is. vLLM packs the weights of other layers.
    linear._cpu_skip_gemm_dispatch = True
    expected = rounded_to_fp8(linear.weight)
    method.process_weights_after_loading(linear)
    monkeypatch.setattr("specserve.engine.cpu.quantized.rounded_to_fp8", torch.zeros_like)
    method.process_weights_after_loading(linear)
    assert torch.equal(linear.weight, expected)
    x = torch.randn(3, 140)
    torch.testing.assert_close(method.apply(linear, x), x @ expected.T)


def test_fp8_has_a_scale_for_each_block() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    weight[130, 260] = 1000.0
    rounded = rounded_to_fp8(weight)
    assert rounded.shape == weight.shape
    assert rounded[130, 260] == 1000.0  # a block's largest value is kept
    # E4M3 has 3 mantissa bits: half of the last one is 1/16 of the value.
    error = (rounded - weight).abs()
    within = error <= weight.abs() / 16 + 1e-4
    in_block = torch.zeros(200, 300, dtype=torch.bool)
    in_block[128:, 256:] = True
    assert within[~in_block].all()
    assert not within[in_block].all()  # small values lose more beside a large one


def test_a_row_of_zeros_stays_zero() -> None:
    zeros = torch.zeros(4, 8)
    assert torch.equal(rounded_to_int8(zeros, zeros.amax(-1)), zeros)
    assert torch.equal(rounded_to_fp8(zeros), zeros)
