"""The training models compute what transformers computes from the exported folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from tools.demo_models.base_model import BaseModel
from tools.demo_models.draft_model import DraftModel
from tools.demo_models.export import (
    base_tensors,
    draft_tensors,
    export_base,
    export_draft,
    load_into,
)
from tools.demo_models.shapes import BaseShape, DraftShape

VOCAB_SIZE = 512


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Sets random weights without symmetries, exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if "bias" in n)):
        scale = 0.3 if tensor.ndim < 2 else 1.5 * tensor.shape[-1] ** -0.5
        tensor.normal_(0, scale, generator=generator)
        if tensor.ndim < 2 and len(tensor) > 8:
            tensor.add_(1)
        tensor.copy_(tensor.bfloat16())


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, 300), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_the_base_agrees_with_transformers_past_the_original_context(
    base_shape: BaseShape, tokenizer: Tokenizer, tokens: torch.Tensor, tmp_path: Path
) -> None:
    from dataclasses import replace

    yarn = replace(base_shape.rope_scaling, original_max_position_embeddings=64)
    shape = replace(base_shape, rope_scaling=yarn)
    model = BaseModel(shape, max_tokens=512).eval()
    _randomise(model)
    export_base(model, tokenizer, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = model.lm_head(model.hidden(tokens))
    assert (ours - reference(tokens).logits).abs().max() < 1e-3
    assert ours.std() > 0.1


@torch.no_grad()
def test_the_draft_model_agrees_with_transformers(
    draft_shape: DraftShape, tokenizer: Tokenizer, tokens: torch.Tensor, tmp_path: Path
) -> None:
    model = DraftModel(draft_shape, max_tokens=512).eval()
    _randomise(model)
    export_draft(model, tokenizer, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (model(tokens) - reference(tokens).logits).abs().max() < 1e-3


def test_the_mtp_layer_is_stored_after_the_last_layer_with_its_copies(
    base_shape: BaseShape, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = BaseModel(base_shape, max_tokens=64)
    _randomise(model)
    export_base(model, tokenizer, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = f"model.layers.{base_shape.num_hidden_layers}"
    assert torch.equal(stored[f"{layer}.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert torch.equal(stored[f"{layer}.shared_head.head.weight"], stored["lm_head.weight"])
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.kv_b_proj"):
        assert stored[f"{layer}.{name}.weight"].dtype == torch.bfloat16
    assert stored[f"{layer}.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert f"{layer}.mlp.experts.{base_shape.n_routed_experts - 1}.down_proj.weight" in stored


def test_training_continues_from_exported_folders(
    base_shape: BaseShape, draft_shape: DraftShape, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    base, draft = BaseModel(base_shape, max_tokens=64), DraftModel(draft_shape, max_tokens=64)
    _randomise(base)
    _randomise(draft)
    export_base(base, tokenizer, tmp_path / "base")
    export_draft(draft, tokenizer, tmp_path / "draft")
    new_base, new_draft = (
        BaseModel(base_shape, max_tokens=64),
        DraftModel(draft_shape, max_tokens=64),
    )
    load_into(base_tensors(new_base), tmp_path / "base")
    load_into(draft_tensors(new_draft), tmp_path / "draft")
    for model, expected in ((new_base, base), (new_draft, draft)):
        state = model.state_dict()
        assert all(torch.equal(state[n], tensor) for n, tensor in expected.state_dict().items())
