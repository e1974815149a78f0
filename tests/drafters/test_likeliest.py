from __future__ import annotations

import math

import pytest
import torch

from specserve.drafters.likeliest import guesses, likeliest


def test_the_likeliest_token_comes_with_its_probability() -> None:
    tokens, chances = likeliest(torch.tensor([[0.0, math.log(3.0)], [1000.0, -1000.0]]))
    assert tokens.tolist() == [1, 0]
    assert chances.tolist() == pytest.approx([0.75, 1.0])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_model_that_computes_no_numbers_is_sure_of_nothing(wrong: float) -> None:
    _, chances = likeliest(torch.tensor([[0.0, wrong], [0.0, 1.0]]))
    assert chances[0] == 0
    assert chances[1] > 0.5


def test_rows_end_at_different_steps() -> None:
    steps = [
        (torch.tensor([1, 2]), torch.tensor([0.5, 0.25])),
        (torch.tensor([3]), torch.tensor([0.75])),
    ]
    assert guesses(steps, 3) == [((1, 3), (0.5, 0.75)), ((2,), (0.25,)), ((), ())]
