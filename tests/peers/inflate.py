"""A model with extra layers that add cost but do not change the output."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specserve.core.config import AppConfig

_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")
_WRITES = ("o_proj.weight", "down_proj.weight")
"""Projections that add to the hidden state."""


def inflate(model: Path, out: Path, num_layers: int) -> None:
    """Copies a DeepSeek-V3-architecture checkpoint, with ``num_layers`` more layers.

    They are copies of the last layer with output projections of zero. They cost as much as the
    other layers and change nothing. The MTP layer stays after all of them.
    """
    shutil.copytree(model, out)
    config = json.loads((out / "config.json").read_text())
    last = config["num_hidden_layers"]
    config["num_hidden_layers"] = last + num_layers
    (out / "config.json").write_text(json.dumps(config, indent=2))
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        match = _LAYER.fullmatch(name)
        if match is None:
            weights[name] = tensor
            continue
        before, number, rest = match[1], int(match[2]), match[3]
        weights[f"{before}{number + num_layers if number == last else number}{rest}"] = tensor
        if number == last - 1:
            blank = torch.zeros_like(tensor) if rest.endswith(_WRITES) else tensor
            for added in range(last, last + num_layers):
                weights[f"{before}{added}{rest}"] = blank.clone()
    save_file(weights, out / "model.safetensors", {"format": "pt"})


def inflated(config: AppConfig, num_layers: int, folder: Path) -> AppConfig:
    """The configuration with ``num_layers`` more target layers. Writes the target to ``folder``."""
    if not num_layers:
        return config
    inflate(Path(config.model.path), folder, num_layers)
    model = config.model.model_copy(update={"path": str(folder)})
    return config.model_copy(update={"model": model})
