from __future__ import annotations

from typing import cast

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

import specserve.engine.cpu.worker  # noqa: F401  vLLM's CPU worker must be imported first
from specserve.engine.cpu.mla_prefill import FlashPrefillBackend, use_flash_prefill

HEADS, KEY, VALUE = 2, 48, 32


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a backend of vLLM's CPU build")
def test_vllm_finds_this_backend_under_its_own_name() -> None:
    use_flash_prefill()
    assert MLAPrefillBackendEnum.CPU.get_class() is FlashPrefillBackend


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("value_width", [VALUE, KEY, KEY + 16])
def test_attention_over_prompts_of_several_lengths_equals_vllms(
    dtype: torch.dtype, tolerance: float, value_width: int
) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([0, 1, 40, 240], dtype=torch.int32)
    shapes = (KEY, KEY, value_width)
    q, k, v = (torch.randn(240, HEADS, width, dtype=dtype) for width in shapes)
    ours = FlashPrefillBackend.__new__(FlashPrefillBackend)
    theirs = CPUSDPAMLAPrefillBackend.__new__(CPUSDPAMLAPrefillBackend)
    ours.scale = theirs.scale = 0.2
    found, expected = (
        cast(torch.Tensor, each._ragged_sdpa(q, k, v, bounds, bounds, True, False))
        for each in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
