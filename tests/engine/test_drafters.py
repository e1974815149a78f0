from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from specserve.core.config import ModelConfig
from specserve.core.errors import ConfigError
from specserve.core.source_config import DraftModelConfig
from specserve.drafters.host import HostedDrafter
from specserve.drafters.options import DrafterOptions
from specserve.engine.drafters import drafter_finder, spare_gpus


def options(folder: Path) -> DrafterOptions:
    """Options of the drafter that a replica without a cluster starts for this draft model."""
    config = DraftModelConfig(kind="draft_model", model=str(folder))
    exits: list[Callable[[], None]] = []
    found = drafter_finder(
        ModelConfig(path="m"), "", 64, exits, threading.Event(), iter(()), config
    )
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


@pytest.mark.parametrize(
    ("visible", "count", "spare"),
    [
        (None, 3, ["1", "2"]),
        ("3,1", 2, ["1"]),
        ("GPU-a,GPU-b,GPU-c", 3, ["GPU-b", "GPU-c"]),
        ("0,1,7", 2, ["1"]),  # there is no GPU 7
        ("2", 1, []),
        ("", 0, []),
        (None, 0, []),
    ],
)
def test_the_target_has_the_first_visible_gpu(
    visible: str | None, count: int, spare: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert spare_gpus() == spare


@pytest.mark.parametrize(
    ("placement", "num_gpus", "spare", "gpu", "waits"),
    [
        ("actor", 1.0, ["1", "2"], "1", False),
        ("actor", 0.5, ["1", "2"], "1", False),
        ("actor", 0.5, [], "", True),
        ("beside_rank_0", 0.1, ["1", "2"], "", True),
        ("actor", 0.0, ["1", "2"], "", False),
    ],
)
def test_a_local_drafter_has_a_gpu_beside_the_targets_if_there_is_one(
    placement: Literal["actor", "beside_rank_0"],
    num_gpus: float,
    spare: list[str],
    gpu: str,
    waits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HostedDrafter, "__call__", lambda self: self._gpu)
    config = DraftModelConfig(
        kind="draft_model", model=str(tmp_path), placement=placement, num_gpus=num_gpus
    )
    is_warm = threading.Event()
    find = drafter_finder(ModelConfig(path="m"), "", 64, [], is_warm, iter(spare), config)
    assert find() == (None if waits else gpu)
    is_warm.set()
    assert find() == gpu


def test_a_local_drafter_that_wants_a_whole_gpu_does_not_get_another_ones(tmp_path: Path) -> None:
    config = DraftModelConfig(kind="draft_model", model=str(tmp_path), num_gpus=1.0)
    gpus, is_warm = iter(["1"]), threading.Event()
    drafter_finder(ModelConfig(path="m"), "", 64, [], is_warm, gpus, config)
    with pytest.raises(ConfigError) as refused:
        drafter_finder(ModelConfig(path="m"), "", 64, [], is_warm, gpus, config)
    assert str(refused.value) == (
        "speculation.draft_model.num_gpus: 1.0 is not allowed; "
        "allowed: a part of the target's GPU, as no other visible one is left"
    )
