from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from specserve.core.config import ModelConfig
from specserve.core.source_config import DraftModelConfig
from specserve.drafters.host import HostedDrafter
from specserve.drafters.options import DrafterOptions
from specserve.engine.drafters import drafter_finder


def options(folder: Path) -> DrafterOptions:
    """Options of the drafter that a replica without a cluster starts for this draft model."""
    config = DraftModelConfig(kind="draft_model", model=str(folder))
    exits: list[Callable[[], None]] = []
    found = drafter_finder(ModelConfig(path="m"), "", 64, exits, threading.Event(), config)
    assert isinstance(found, HostedDrafter)
    return found._options


def test_other_weights_in_the_same_folder_make_another_drafter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"first")
    first = options(tmp_path)
    assert options(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert options(tmp_path).name(0) != first.name(0)


def test_a_folder_without_a_model_is_left_for_the_drafter_to_refuse(tmp_path: Path) -> None:
    assert options(tmp_path).content == ""


def test_a_local_drafter_on_the_targets_gpu_starts_after_the_engine_measured_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostedDrafter, "__call__", lambda self: "tcp://drafter")
    config = DraftModelConfig(kind="draft_model", model=str(tmp_path), num_gpus=0.1)
    is_warm = threading.Event()
    find = drafter_finder(ModelConfig(path="m"), "", 64, [], is_warm, config)
    assert find() is None
    is_warm.set()
    assert find() == "tcp://drafter"
