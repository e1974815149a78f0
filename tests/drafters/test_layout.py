"""Weights that are laid out anew are the same."""

from __future__ import annotations

import torch

from specserve.drafters.causal_model import CausalModel
from specserve.drafters.layout import laid_out
from tests.drafters.mtp_reference import MODEL

CPU = torch.device("cpu")


def test_a_float32_matrix_has_its_columns_one_after_the_other() -> None:
    weight = torch.randn(5, 7)
    assert torch.equal(laid_out(weight), weight)
    assert laid_out(weight).t().is_contiguous()
    half = weight.bfloat16()
    assert laid_out(half) is half


def test_a_loaded_models_layers_are_laid_out_and_its_tied_head_is_not_kept_twice() -> None:
    model = CausalModel.load(str(MODEL.parent / "demo-draft"), torch.float32, CPU)._model
    assert model.model.layers[0].mlp.gate_proj.weight.t().is_contiguous()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.lm_head.weight.is_contiguous()
