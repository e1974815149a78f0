"""Compiled models on CPU: what a machine needs to compile, and vLLM's cache of compiled models."""

from __future__ import annotations

import os
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from vllm import envs
from vllm.compilation import caching
from vllm.config import VllmConfig

from specserve.engine.cpu import linear, rotary


def missing_for_compilation() -> str:
    """What torch's compiler needs and this machine lacks; empty: nothing."""
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        return "a C++ compiler (Debian: g++)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"{header} (Debian: python3.11-dev)"
    folder = Path(envs.VLLM_CACHE_ROOT)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return "" if os.access(folder, os.W_OK) else f"write access to {folder} (VLLM_CACHE_ROOT)"


def use_saved_models() -> None:
    """Repairs, in this process, vLLM's loading of a compiled model that an earlier engine saved.

    vLLM 0.32 saves the model that it compiled on CPU, but fails to load it and compiles it again.
    It would also load a model for a CPU with other instructions, or with other linear layers in
    float32.
    """
    torch.compiler.load_compiled_function = _loaded
    caching.aot_compile_hash_factors = _factors_of_model


_load, _factors = torch.compiler.load_compiled_function, caching.aot_compile_hash_factors


def _loaded(*args: Any, **kwargs: Any) -> Any:
    function: Any = _load(*args, **kwargs)
    compiled = function._artifacts.compiled_fn
    if not hasattr(compiled, "finalize_loading"):  # only those of vLLM's GPU backend have it
        compiled.finalize_loading = lambda config: None
    return function


def _factors_of_model(config: VllmConfig) -> list[str]:
    """What a saved model depends on. Linear layers are known, since they have been loaded."""
    capabilities = sorted(torch.cpu.get_capabilities().items())
    in_float32 = str(sorted(linear.in_float32.items()))
    return [*_factors(config), str(capabilities), in_float32, rotary.ORDER]
