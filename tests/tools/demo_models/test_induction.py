from __future__ import annotations

import torch
from torch import Tensor

from tools.demo_models import base_model, draft_model
from tools.demo_models.base_model import BaseModel
from tools.demo_models.draft_model import DraftModel
from tools.demo_models.induction import plant_in_base, plant_in_draft, plant_in_mtp
from tools.demo_models.shapes import VOCAB_SIZE, BaseShape, DraftShape

SPAN = 60


def _twice(generator: torch.Generator) -> Tensor:
    span = torch.randint(6, VOCAB_SIZE, (4, SPAN), generator=generator)
    return torch.cat([span, span], dim=1)


def _copied(logits: Tensor, rows: Tensor) -> float:
    """Share of the span's second copy that the greedy choice predicts."""
    right = logits[:, SPAN:-1].argmax(dim=-1) == rows[:, SPAN + 1 :]
    return float(right.float().mean())


@torch.no_grad()
def test_the_base_copies_random_tokens_before_any_training() -> None:
    generator = torch.Generator().manual_seed(0)
    model = BaseModel(BaseShape(), max_tokens=2 * SPAN).eval()
    base_model.initialise(model, generator)
    rows = _twice(generator)
    assert _copied(model.lm_head(model.hidden(rows)), rows) < 0.05
    plant_in_base(model, generator)
    assert _copied(model.lm_head(model.hidden(rows)), rows) > 0.5


@torch.no_grad()
def test_the_mtp_layer_copies_the_token_after_next_before_any_training() -> None:
    generator = torch.Generator().manual_seed(0)
    model = BaseModel(BaseShape(), max_tokens=2 * SPAN).eval()
    base_model.initialise(model, generator)
    plant_in_base(model, generator)
    plant_in_mtp(model, torch.cat([_twice(generator) for _ in range(4)]), generator)
    rows = _twice(generator)
    guesses = model.lm_head(model.mtp_hidden(model.hidden(rows[:, :-1]), rows[:, 1:]))
    right = guesses[:, SPAN:-1].argmax(dim=-1) == rows[:, SPAN + 2 :]
    assert float(right.float().mean()) > 0.3


@torch.no_grad()
def test_the_draft_model_copies_random_tokens_before_any_training() -> None:
    generator = torch.Generator().manual_seed(0)
    model = DraftModel(DraftShape(), max_tokens=2 * SPAN).eval()
    draft_model.initialise(model, generator)
    rows = _twice(generator)
    assert _copied(model(rows), rows) < 0.05
    plant_in_draft(model, generator)
    assert _copied(model(rows), rows) > 0.3
