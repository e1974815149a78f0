"""Chooses how a model with latent attention (MLA) attends on CPU.

On a CPU with AMX, vLLM 0.32 takes its AMX backend for every model with MLA. A model whose sizes or
dtype the AMX kernels refuse then fails at the first prompt.
"""

from __future__ import annotations

import os

import torch
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from specserve.engine.model_shapes import NO_MLA, is_plain_on_cpu

_AMX_HEAD_SIZE, _AMX_MULTIPLE = 576, 32


def choose_latent_attention(arguments: EngineArgs) -> None:
    """Chooses plain attention, or the backend ``CPU_MLA`` if vLLM's AMX backend does not fit.

    Plain attention is an environment variable of vLLM, which the engine's processes inherit. The
    choice also holds for vLLM's own drafter, a part of the same model. What the user chose is kept:
    a backend, or that variable.
    """
    is_named = arguments.attention_backend or arguments.attention_config.backend
    if is_named or not current_platform.is_cpu():
        return
    model = arguments.create_model_config()
    if is_plain_on_cpu(model.hf_text_config.to_dict(), arguments.tensor_parallel_size):
        os.environ[NO_MLA] = "1"
    elif has_amx() and not fits_amx(model):
        arguments.attention_backend = AttentionBackendEnum.CPU_MLA
        if arguments.speculative_config is not None:
            arguments.speculative_config.setdefault("attention_backend", "CPU_MLA")


def has_amx() -> bool:
    """Whether this machine is an x86 CPU with AMX, by vLLM's test."""
    return bool(is_x86() and torch.cpu._is_amx_tile_supported())


def is_x86() -> bool:
    """Whether vLLM runs on an x86 CPU."""
    architecture = current_platform.get_cpu_architecture()
    return bool(current_platform.is_cpu() and architecture == CpuArchEnum.X86)


def fits_amx(model: ModelConfig) -> bool:
    """Whether vLLM's AMX kernels can run the model's latent attention; True if it has none."""
    text = model.hf_text_config
    if not model.use_mla or getattr(text, "kv_lora_rank", None) is None:
        return True  # MLA without kv_lora_rank is DeepSeek-V4, which has other kernels in vLLM
    multiples = (text.qk_nope_head_dim, text.v_head_dim)
    return (
        model.dtype == torch.bfloat16
        and text.kv_lora_rank + text.qk_rope_head_dim == _AMX_HEAD_SIZE
        and not any(size % _AMX_MULTIPLE for size in multiples)
    )
