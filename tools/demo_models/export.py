"""Writes trained weights as Hugging Face folders, with DeepSeek's and Llama's tensor names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_models.base_model import BaseModel
from tools.demo_models.draft_model import DraftModel
from tools.demo_models.shapes import MAX_TOKENS
from tools.demo_models.tokenizer import BOS_ID, END_ID, PAD_ID, save_tokenizer


def export_base(model: BaseModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the base and its MTP layer into `folder`, in bfloat16; router biases in float32."""
    _write(folder, model.shape.hf_config(), base_tensors(model), tokenizer)


def export_draft(model: DraftModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the draft model into `folder`, in bfloat16."""
    _write(folder, model.shape.hf_config(), draft_tensors(model), tokenizer)


def base_tensors(model: BaseModel) -> dict[str, Tensor]:
    """The base's tensors by DeepSeek's names.

    As in DeepSeek-R1's checkpoint, the MTP layer follows the last layer and repeats the embedding
    and the head.
    """
    mtp = f"model.layers.{model.shape.num_hidden_layers}"
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("mtp."):
            own = name.removeprefix("mtp.")
            if own.startswith("block."):
                target = f"{mtp}.{own.removeprefix('block.')}"
            elif own == "norm.weight":
                target = f"{mtp}.shared_head.norm.weight"
            else:
                target = f"{mtp}.{own}"
        else:
            target = name if name.startswith("lm_head") else f"model.{name}"
        prefix, marker, projection = target.partition(".mlp.experts.")
        if marker:
            for j, expert in enumerate(tensor):
                tensors[f"{prefix}.mlp.experts.{j}.{projection}.weight"] = expert
        else:
            tensors[target] = tensor
    tensors[f"{mtp}.embed_tokens.weight"] = model.embed_tokens.weight
    tensors[f"{mtp}.shared_head.head.weight"] = model.lm_head.weight
    return tensors


def draft_tensors(model: DraftModel) -> dict[str, Tensor]:
    """The draft model's tensors by Llama's names."""
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


@torch.no_grad()
def load_into(tensors: dict[str, Tensor], folder: Path) -> None:
    """Copies an exported folder's weights into the tensors of `base_tensors` or `draft_tensors`."""
    stored = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        tensor.copy_(stored[name])


def _write(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], tokenizer: Tokenizer
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        # As in DeepSeek, the routers' bias stays float32: bfloat16 cannot represent its steps.
        name: tensor.detach()
        .cpu()
        .to(torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        .clone()
        .contiguous()
        for name, tensor in tensors.items()
    }
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    # safetensors creates files that only their owner can read.
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", config)
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "do_sample": False,
    }
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder, max_tokens=MAX_TOKENS)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
