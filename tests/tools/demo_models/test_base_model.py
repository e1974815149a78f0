from __future__ import annotations

import torch

from tools.demo_models.base_model import BaseModel, Router, initialise
from tools.demo_models.objectives import BaseObjective
from tools.demo_models.shapes import BaseShape


def _model(shape: BaseShape) -> BaseModel:
    model = BaseModel(shape, max_tokens=64)
    initialise(model, torch.Generator().manual_seed(0))
    return model


@torch.no_grad()
def test_the_mtp_layer_does_not_see_the_token_it_predicts(base_shape: BaseShape) -> None:
    model = _model(base_shape).eval()
    rows = torch.randint(0, 512, (1, 20), generator=torch.Generator().manual_seed(1))
    changed = rows.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 512

    def guesses(tokens: torch.Tensor) -> torch.Tensor:
        return model.mtp_hidden(model.hidden(tokens[:, :-1]), tokens[:, 1:])[0]

    same = (guesses(rows) - guesses(changed)).abs().amax(dim=-1) < 1e-6
    # Row i has seen tokens 0..i+1 and predicts token i+2: row 10 predicts token 12.
    assert same.tolist() == [True] * 11 + [False] * 8


@torch.no_grad()
def test_the_mtp_layer_ignores_the_embedding_at_position_zero(base_shape: BaseShape) -> None:
    model = _model(base_shape).eval()
    hidden = torch.randn(1, 4, base_shape.hidden_size)
    a = model.mtp_hidden(hidden, torch.tensor([[1, 2, 3, 4]]))
    b = model.mtp_hidden(hidden, torch.tensor([[9, 2, 3, 4]]))
    assert torch.equal(a, b)


@torch.no_grad()
def test_the_bias_steers_tokens_towards_idle_experts(base_shape: BaseShape) -> None:
    router = Router(base_shape)
    router.weight.zero_()
    router.weight[:2] = 1.0
    x = torch.ones(50, base_shape.hidden_size)
    weights, experts = router(x)
    assert set(experts.flatten().tolist()) == {0, 1}
    assert torch.allclose(weights.sum(dim=-1), torch.ones(50))
    chosen = set()
    for _ in range(60):
        router.balance(0.01)
        chosen |= set(router(x)[1].flatten().tolist())
    assert chosen == {0, 1, 2, 3}


def test_every_parameter_gets_a_gradient(base_shape: BaseShape) -> None:
    model = _model(base_shape)
    rows = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(1))
    loss, numbers = BaseObjective(model).loss(rows)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert set(numbers) == {"loss", "mtp", "repetition"}
