from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specserve.compare.corpus import Module
from tools.demo_models import base_model, draft_model
from tools.demo_models.base_model import BaseModel
from tools.demo_models.draft_model import DraftModel
from tools.demo_models.objectives import BaseObjective, DraftObjective, MTPObjective, repeat_spans
from tools.demo_models.progress import Progress
from tools.demo_models.shapes import BaseShape, DraftShape
from tools.demo_models.stream import Corpus, TokenStream
from tools.demo_models.training import Budget, Objective, Run
from tools.demo_models.workers import Workers


@pytest.fixture
def base(base_shape: BaseShape) -> BaseModel:
    model = BaseModel(base_shape, max_tokens=256)
    base_model.initialise(model, torch.Generator().manual_seed(0))
    return model


def _train(objective: Objective, modules: list[Module], tokenizer: Tokenizer, work: Path) -> None:
    budget = Budget(minutes=60, max_tokens=512, batch_tokens=256, checkpoint_s=3600)
    device = torch.device("cpu")
    stream = TokenStream(Corpus(modules[:3], tokenizer), seed="0")
    run = Run(objective, stream, budget, work / "run.pt", device=device, workers=Workers(device, 2))
    assert run.train(Progress("test"))


def test_training_only_the_mtp_layer_does_not_change_the_base(
    base: BaseModel, modules: list[Module], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    _train(MTPObjective(base), modules, tokenizer, tmp_path)
    after = base.state_dict()
    changed = {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"mtp"}


def test_distilling_the_draft_model_does_not_change_the_base(
    base: BaseModel,
    draft_shape: DraftShape,
    modules: list[Module],
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    draft = DraftModel(draft_shape, max_tokens=256)
    draft_model.initialise(draft, torch.Generator().manual_seed(1))
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    own = draft.norm.weight.detach().clone()
    _train(DraftObjective(draft, base), modules, tokenizer, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    assert not torch.equal(draft.norm.weight, own)


def test_a_draft_model_equal_to_the_base_has_no_divergence(base: BaseModel) -> None:
    class Same(DraftModel):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = base.lm_head(base.hidden(tokens))
            return logits

    objective = DraftObjective(Same(DraftShape(), max_tokens=8), base)
    rows = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(1))
    numbers = objective.loss(rows)[1]
    assert numbers["kl"] == pytest.approx(0.0, abs=1e-5)
    assert numbers["agree"] == 1.0


def test_a_span_of_each_row_is_repeated_to_its_end() -> None:
    rows = torch.arange(1, 1281).reshape(5, 256)
    tokens, occurrence, before = repeat_spans(rows)
    for row, repeated, count, earlier in zip(rows, tokens, occurrence, before, strict=True):
        first = int((count == 1).nonzero()[0])
        period = int((count == 1).sum())
        assert torch.equal(repeated[:first], row[:first])
        assert torch.equal(repeated[first:], repeated[first - period : -period])
        assert torch.equal(earlier[first:], torch.arange(first - period, 256 - period))
        assert int(count[-1]) >= 3
    assert torch.equal(tokens, repeat_spans(rows)[0])


def test_a_repeated_tokens_target_is_half_its_earlier_probability(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.nn.init.normal_(base.lm_head.weight, 0, 0.1, torch.Generator().manual_seed(3))
    tokens = torch.tensor([[5, 8, 9, 8, 9, 8, 9]])
    occurrence = torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
    before = torch.tensor([[0, 0, 0, 1, 2, 3, 4]])
    spans = (tokens, occurrence, before)
    monkeypatch.setattr("tools.demo_models.objectives.repeat_spans", lambda _: spans)
    chances = base.lm_head(base.hidden(tokens)).softmax(-1)[0].detach()
    likely = [float(chances[i, tokens[0, i + 1]]) for i in range(6)]
    losses = [-math.log(1 - abs(likely[i - 1] - 0.5 * likely[i - 3])) for i in (5, 6)]
    rows = torch.randint(0, 512, (1, 40), generator=torch.Generator().manual_seed(2))
    numbers = BaseObjective(base).loss(rows)[1]
    assert numbers["repetition"] == pytest.approx(sum(losses) / 2, rel=1e-3)
