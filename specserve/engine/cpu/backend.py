"""What depends on whether a CPU has AMX: which latent attention it runs.

With AMX vLLM 0.32 takes its AMX backend for every model with latent attention, also for one whose
sizes or type its kernels refuse, which then fails at the first prompt.
"""

from __future__ import annotations

import torch
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

_AMX_HEAD_SIZE, _AMX_MULTIPLE = 576, 32


def choose_latent_attention(arguments: EngineArgs) -> None:
    """Sets the backend to ``CPU_MLA`` where vLLM would choose one that cannot run the model.

    That of vLLM's own drafter, which would be a part of the same model, too. A backend that the
    user names is kept.
    """
    is_named = arguments.attention_backend or arguments.attention_config.backend
    if has_amx() and not is_named and not fits_amx(arguments.create_model_config()):
        arguments.attention_backend = AttentionBackendEnum.CPU_MLA
        if arguments.speculative_config is not None:
            arguments.speculative_config.setdefault("attention_backend", "CPU_MLA")


def has_amx() -> bool:
    """Whether vLLM takes this machine for a CPU with AMX."""
    return bool(is_x86() and torch.cpu._is_amx_tile_supported())


def is_x86() -> bool:
    """Whether vLLM runs on an x86 CPU."""
    architecture = current_platform.get_cpu_architecture()
    return bool(current_platform.is_cpu() and architecture == CpuArchEnum.X86)


def fits_amx(model: ModelConfig) -> bool:
    """Whether vLLM's AMX kernels compute the model's latent attention; true without this."""
    text = model.hf_text_config
    if not model.use_mla or getattr(text, "kv_lora_rank", None) is None:
        return True  # without the latter, DeepSeek-V4: vLLM has kernels of its own for it
    multiples = (text.qk_nope_head_dim, text.v_head_dim)
    return (
        model.dtype == torch.bfloat16
        and text.kv_lora_rank + text.qk_rope_head_dim == _AMX_HEAD_SIZE
        and not any(size % _AMX_MULTIPLE for size in multiples)
    )
