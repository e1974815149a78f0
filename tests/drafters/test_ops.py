from __future__ import annotations

import math

import pytest
import torch

from specserve.drafters.causal_model import CausalModel
from specserve.drafters.ops import laid_out, most_likely
from tests.drafters.mtp_reference import MODEL

CPU = torch.device("cpu")


def test_a_float32_matrix_is_stored_by_columns() -> None:
    weight = torch.randn(5, 7)
    assert torch.equal(laid_out(weight), weight)
    assert laid_out(weight).t().is_contiguous()
    half = weight.bfloat16()
    assert laid_out(half) is half


def test_a_loaded_model_has_laid_out_layers_and_one_copy_of_a_tied_head() -> None:
    model = CausalModel.load(str(MODEL.parent / "demo-draft"), torch.float32, CPU)._model
    assert model.model.layers[0].mlp.gate_proj.weight.t().is_contiguous()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.lm_head.weight.is_contiguous()


def test_the_likeliest_token_comes_with_its_probability() -> None:
    tokens, chances = most_likely(torch.tensor([[0.0, math.log(3.0)], [1000.0, -1000.0]]))
    assert tokens.tolist() == [1, 0]
    assert chances.tolist() == pytest.approx([0.75, 1.0])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_the_chance_is_zero_if_a_logit_is_not_finite(wrong: float) -> None:
    _, chances = most_likely(torch.tensor([[0.0, wrong], [0.0, 1.0]]))
    assert chances[0] == 0
    assert chances[1] > 0.5
