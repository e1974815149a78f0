from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor.exc import InvalidCxxCompiler
from vllm.compilation import caching
from vllm.compilation.counter import compilation_counter
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

from specserve.engine.cpu import compilation, linear
from specserve.engine.cpu.compilation import missing_for_compilation, use_saved_models

needs_compiler = pytest.mark.skipif(missing_for_compilation() != "", reason="compiles a model")


@support_torch_compile(dynamic_arg_dims={"x": 0})
class Doubling(torch.nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.fixture
def _saved_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled models are saved in a new folder, and all replaced functions come back."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(torch.compiler, "load_compiled_function", compilation._load)
    monkeypatch.setattr(caching, "aot_compile_hash_factors", compilation._factors)
    yield
    torch.compiler.reset()


def num_loaded(**additional: str) -> int:
    """Saved models that a new engine loads for its first step."""
    config = VllmConfig(
        compilation_config=CompilationConfig(
            mode=CompilationMode.DYNAMO_TRACE_ONCE, backend="inductor"
        ),
        additional_config=additional,
    )
    before: int = compilation_counter.num_aot_artifacts_loaded
    with set_current_vllm_config(config):
        model = Doubling(vllm_config=config)
        for size in (3, 5):
            assert torch.equal(model(torch.ones(size)), torch.full((size,), 2.0))
    after: int = compilation_counter.num_aot_artifacts_loaded
    return after - before


@needs_compiler
@pytest.mark.usefixtures("_saved_in")
def test_the_next_engine_loads_the_saved_model(monkeypatch: pytest.MonkeyPatch) -> None:
    use_saved_models()
    assert num_loaded() == 0
    assert num_loaded() == 1
    assert num_loaded(of_vllm="an option") == 0
    with monkeypatch.context() as patch:
        patch.setitem(linear.in_float32, (64, 32), True)
        assert num_loaded() == 0
        patch.setitem(linear.in_float32, (64, 32), False)
        assert num_loaded() == 0
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": "other"})
    assert num_loaded() == 0


@needs_compiler
@pytest.mark.usefixtures("_saved_in")
def test_vllm_itself_does_not_load_it() -> None:
    assert [num_loaded(), num_loaded()] == [0, 0]


def test_a_compiler_needs_pythons_headers_and_a_folder_that_it_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache))
    monkeypatch.setattr(compilation, "get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert missing_for_compilation() == f"{tmp_path}/Python.h (Debian: python3.11-dev)"
    (tmp_path / "Python.h").touch()
    cache.touch()  # a file, so that the folder cannot be made
    monkeypatch.setattr(os, "access", lambda path, mode: path.is_dir())
    assert missing_for_compilation() == f"write access to {cache} (VLLM_CACHE_ROOT)"
    cache.unlink()
    assert missing_for_compilation() == ""

    def no_compiler() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(compilation, "get_cpp_compiler", no_compiler)
    assert missing_for_compilation() == "a C++ compiler (Debian: g++)"
