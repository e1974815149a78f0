from __future__ import annotations

import pytest
import torch

from tools.demo_models.base_model import BaseModel, initialise
from tools.demo_models.completions import complete, ends_in_a_loop, loop_share
from tools.demo_models.shapes import BaseShape
from tools.demo_models.tokenizer import END_ID

BEFORE = list(range(100, 164))


@pytest.mark.parametrize("period", [1, 3, 16])
def test_a_tail_that_repeats_with_a_short_period_is_a_loop(period: int) -> None:
    tail = (list(range(period)) * 64)[:64]
    assert ends_in_a_loop(BEFORE + tail)


@pytest.mark.parametrize(
    "tail",
    [
        (list(range(17)) * 4)[:64],
        [99, *[1, 2] * 31, 1],
        [*[1, 2] * 31, 1, 99],
        [1] * 63,
    ],
    ids=["longer period", "begins later", "ended before", "too short"],
)
def test_any_other_tail_is_no_loop(tail: list[int]) -> None:
    assert not ends_in_a_loop(tail if len(tail) < 64 else BEFORE + tail)


class Counting(BaseModel):
    """Writes token n + 1 after token n, and at `wrap` starts again from `first`."""

    def __init__(self, shape: BaseShape, *, first: int, wrap: int) -> None:
        super().__init__(shape, max_tokens=512)
        initialise(self, torch.Generator().manual_seed(0))
        self.first, self.wrap = first, wrap
        self.lm_head = torch.nn.Identity()  # type: ignore[assignment]

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        following = torch.where(tokens + 1 >= self.wrap, self.first, tokens + 1)
        return torch.nn.functional.one_hot(following, self.shape.vocab_size).float()


def test_each_completion_is_greedy_and_ends_before_its_end_token(base_shape: BaseShape) -> None:
    model = Counting(base_shape, first=END_ID, wrap=10)
    assert complete(model, torch.tensor([[5, 5], [4, 7]]), 4) == [[6, 7, 8, 9], [8, 9]]


def test_the_share_counts_the_completions_that_loop(base_shape: BaseShape) -> None:
    rows = torch.tensor([[start] * 130 for start in (10, 200, 300, 350)])
    model = Counting(base_shape, first=400, wrap=410)
    # The row from 300 reaches the loop with fewer than 64 tokens left.
    assert loop_share(model, rows) == 0.25
    assert loop_share(Counting(base_shape, first=20, wrap=30), rows) == 1.0
