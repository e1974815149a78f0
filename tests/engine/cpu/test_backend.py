from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from specserve.engine.cpu.backend import choose_latent_attention, fits_amx

DEMO = Path(__file__).parents[3] / "configs/models/demo-base"


def model(**sizes: Any) -> Any:
    deepseek: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "use_mla": True,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    fields = deepseek | sizes
    return SimpleNamespace(**fields, hf_text_config=SimpleNamespace(**fields))


def test_amx_fits_deepseek_and_models_without_latent_attention() -> None:
    assert fits_amx(model())
    assert fits_amx(model(use_mla=False, v_head_dim=1, dtype=torch.float32))
    assert fits_amx(model(kv_lora_rank=None))


@pytest.mark.parametrize(
    "sizes",
    [
        {"v_head_dim": 48},
        {"qk_nope_head_dim": 16},
        {"kv_lora_rank": 256},
        {"dtype": torch.float32},
    ],
)
def test_amx_does_not_fit_other_sizes_and_types(sizes: dict[str, Any]) -> None:
    assert not fits_amx(model(**sizes))


on_x86 = pytest.mark.skipif(
    not current_platform.is_cpu() or current_platform.get_cpu_architecture() != CpuArchEnum.X86,
    reason="about x86 CPUs",
)


@on_x86
@pytest.mark.parametrize("has_amx", [False, True])
def test_the_demo_model_uses_plain_attention(
    monkeypatch: pytest.MonkeyPatch, has_amx: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(os, "environ", {})
    arguments = EngineArgs(model=str(DEMO))
    choose_latent_attention(arguments)
    assert os.environ == {"VLLM_MLA_DISABLE": "1"}
    assert arguments.attention_backend is None


@on_x86
@pytest.mark.parametrize(
    ("has_amx", "given", "chosen"),
    [
        (True, None, AttentionBackendEnum.CPU_MLA),
        (True, AttentionBackendEnum.AMX_MLA, AttentionBackendEnum.AMX_MLA),
        (False, None, None),
    ],
)
def test_the_demo_models_latent_attention_does_not_use_amx_by_default(
    monkeypatch: pytest.MonkeyPatch, has_amx: bool, given: Any, chosen: Any
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(os, "environ", {"VLLM_MLA_DISABLE": "0"})
    drafter = {"method": "mtp", "num_speculative_tokens": 1}
    arguments = EngineArgs(
        model=str(DEMO), attention_backend=given, speculative_config=dict(drafter)
    )
    choose_latent_attention(arguments)
    assert os.environ == {"VLLM_MLA_DISABLE": "0"}
    assert arguments.attention_backend == chosen
    of_drafter = {"attention_backend": "CPU_MLA"} if chosen == AttentionBackendEnum.CPU_MLA else {}
    assert arguments.speculative_config == drafter | of_drafter
