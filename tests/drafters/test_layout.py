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


def test_rows_that_are_looked_up_stand_as_they_did_where_the_head_is_tied_to_them() -> None:
    model = CausalModel.load(str(MODEL.parent / "demo-draft"), torch.float32, CPU)._model
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    assert torch.equal(embedding, head)
    assert embedding.is_contiguous()
    assert head.t().is_contiguous()
