from __future__ import annotations

import pytest
import torch

from tools.demo_models.base_model import BaseModel
from tools.demo_models.optimiser import Optimiser, lr_factor, orthogonalise
from tools.demo_models.shapes import BaseShape
from tools.demo_models.workers import Workers


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 16, 32)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_every_parameter_is_updated(base_shape: BaseShape) -> None:
    torch.manual_seed(0)
    model = BaseModel(base_shape, max_tokens=64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    Optimiser(model, Workers(torch.device("cpu"), 2)).step(1.0)
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert still == []


def test_the_learning_rate_warms_up_stays_and_decays() -> None:
    factors = [lr_factor(p / 100) for p in range(101)]
    assert factors[0] < factors[1] < factors[2]
    assert factors[2:41] == [1.0] * 39
    assert factors[40:] == sorted(factors[40:], reverse=True)
    assert factors[-1] < 0.05
