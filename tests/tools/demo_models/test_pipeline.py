"""Training that continues from exported weights, and its model card."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tools.demo_models.card import Start, write_base_card
from tools.demo_models.config import TrainConfig
from tools.demo_models.evaluate import BaseScores
from tools.demo_models.export import base_tensors, draft_tensors
from tools.demo_models.objectives import BaseObjective
from tools.demo_models.pipeline import Pipeline

MODELS = Path(__file__).parents[3] / "configs" / "models"
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(
        start=MODELS,
        corpus=corpus,
        work=tmp_path / "work",
        output=tmp_path / "models",
        device="cpu",
    )


@pytest.fixture
def pipeline(config: TrainConfig) -> Pipeline:
    return Pipeline(config)


def test_both_models_start_from_the_given_folders_with_their_tokenizer(pipeline: Pipeline) -> None:
    for tensors, name in (
        (base_tensors(pipeline.new_base()), "demo-base"),
        (draft_tensors(pipeline.new_draft()), "demo-draft"),
    ):
        stored = load_file(MODELS / name / "model.safetensors")
        assert tensors.keys() == stored.keys()
        assert all(torch.equal(tensors[n], stored[n].to(tensors[n].dtype)) for n in stored)
    shipped = Tokenizer.from_file(str(MODELS / "demo-base" / "tokenizer.json"))
    assert pipeline.tokenizer.to_str() == shipped.to_str()


def test_packages_are_for_training_and_not_for_evaluation(config: TrainConfig) -> None:
    pipeline = Pipeline(replace(config, packages=SITE_PACKAGES))
    folders = {module.name.split("/")[0] for module in pipeline.training}
    assert {"requests", "starlette"} <= folders & set(pipeline.packages)
    assert all(module.name.startswith("module_") for module in pipeline.held_out)


def test_the_card_has_loops_packages_and_the_first_weights(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    base = pipeline.new_base()
    run = pipeline.new_run(BaseObjective(base), "base", 1.0)
    scores = BaseScores(
        loss=2.5,
        mtp_loss=2.6,
        mtp_acceptance=0.7,
        chat_mtp_acceptance=0.8,
        loops=0.25,
        copy_accuracy={"quote": 0.9, "rename": 0.9, "repeat": 0.9},
        num_tokens=1024,
    )
    start = Start(million_tokens=5.86, loops=0.5)
    write_base_card(
        tmp_path, base, scores, [], (run, run), pipeline.config, ["toy", "other"], start
    )
    card = (tmp_path / "README.md").read_text()
    assert "end in a loop | 25.0% |" in card
    assert "weights that training started from | 50.0% |" in card
    assert "had been trained on 5.86 M tokens" in card
    assert "toy, other" in card
    assert "induction" not in card
    training = json.loads((tmp_path / "training.json").read_text())["training"]
    assert training["start"] == {"million_tokens": 5.86, "loops": 0.5}
