from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specserve.compare.corpus import Module
from tools.demo_models.base_model import BaseModel, initialise
from tools.demo_models.objectives import BaseObjective
from tools.demo_models.progress import Progress
from tools.demo_models.shapes import BaseShape
from tools.demo_models.stream import Corpus, TokenStream
from tools.demo_models.training import Budget, Run
from tools.demo_models.workers import Workers

BATCH_TOKENS = 256


class Quiet(Progress):
    """Sends SIGTERM to its own process after `stop_after` steps."""

    def __init__(self, stop_after: int = 0) -> None:
        super().__init__("test")
        self.stop_after = stop_after
        self.losses: list[float] = []

    def update(self, done: float, step: int, tokens: int, numbers: dict[str, float]) -> None:
        self.losses.append(numbers["loss"])
        if step == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def new_run(
    modules: list[Module], tokenizer: Tokenizer, base_shape: BaseShape, tmp_path: Path
) -> Callable[[str], Run]:
    workers = Workers(torch.device("cpu"), 2)

    def make(name: str) -> Run:
        model = BaseModel(base_shape, max_tokens=BATCH_TOKENS)
        initialise(model, torch.Generator().manual_seed(0))
        return Run(
            BaseObjective(model),
            TokenStream(Corpus(modules[:3], tokenizer), seed="0"),
            Budget(
                minutes=60,
                max_tokens=6 * BATCH_TOKENS,
                batch_tokens=BATCH_TOKENS,
                checkpoint_s=3600,
            ),
            tmp_path / name,
            device=torch.device("cpu"),
            workers=workers,
        )

    return make


def test_a_resumed_run_ends_like_an_uninterrupted_one(new_run: Callable[[str], Run]) -> None:
    whole = new_run("whole.pt")
    shown = Quiet()
    assert whole.train(shown)

    stopped = new_run("parts.pt")
    first_part = Quiet(stop_after=3)
    assert not stopped.train(first_part)
    resumed = new_run("parts.pt")
    assert resumed.resume()
    second_part = Quiet()
    assert resumed.train(second_part)

    assert (len(first_part.losses), len(second_part.losses)) == (3, 3)
    assert first_part.losses + second_part.losses == shown.losses
    expected, actual = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_finished_run_does_no_more_steps(new_run: Callable[[str], Run]) -> None:
    run = new_run("done.pt")
    assert run.train(Quiet())
    again = new_run("done.pt")
    assert again.resume()
    shown = Quiet()
    assert again.train(shown)
    assert shown.losses == []


def test_a_run_without_a_checkpoint_cannot_resume(new_run: Callable[[str], Run]) -> None:
    assert not new_run("none.pt").resume()


def test_the_budget_ends_with_the_first_limit() -> None:
    budget = Budget(minutes=1, max_tokens=1000, batch_tokens=10, checkpoint_s=1)
    assert budget.progress(30, 100) == 0.5
    assert budget.progress(6, 900) == 0.9
    assert budget.progress(120, 0) == 1.0
