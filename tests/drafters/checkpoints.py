"""Copies of the demo base: sharded, in block FP8, or without some tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.drafters.mtp_reference import MODEL

LAYER = "model.layers.4."
BLOCK = 128
_FP8_MAX = 448.0


def write_copy(
    folder: Path,
    *,
    keep: Callable[[str], bool] = lambda name: True,
    fp8: bool = False,
    num_shards: int = 1,
    **config: Any,
) -> Path:
    """Writes the demo base into a new folder.

    Args:
        folder: the new folder.
        keep: selects tensors by name.
        fp8: stores the layers' projections in block FP8, as DeepSeek's checkpoints do.
        num_shards: number of files; more than one get an index.
        config: values to change in config.json.
    """
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {n: t for n, t in load_file(MODEL / "model.safetensors").items() if keep(n)}
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
        }
        tensors = dict(pair for item in tensors.items() for pair in _quantized(*item).items())
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(content))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    shard = {name: i * num_shards // len(tensors) for i, name in enumerate(tensors)}
    places = {name: f"part-{number}.safetensors" for name, number in shard.items()}
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, folder / file)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def _quantized(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if not name.endswith("_proj.weight") or "eh_proj" in name:
        return {name: tensor}
    weight, factors = quantize(tensor)
    return {name: weight, f"{name}_scale_inv": factors}


def quantize(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor in float8_e4m3fn, and the float32 factors of its blocks."""
    rows, columns = tensor.shape
    padded = F.pad(tensor.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # type: ignore[no-untyped-call]
    factors = blocks.abs().amax((1, 3)) / _FP8_MAX
    scaled = (blocks / factors[:, None, :, None]).flatten(2).flatten(0, 1)
    return scaled[:rows, :columns].to(torch.float8_e4m3fn), factors
