"""The replay of recorded answers behaves like an engine."""

from __future__ import annotations

import numpy as np
import pytest

from specserve.core.source_config import NgramConfig
from tests.peers.bench_decisions import Ours, Perfect, StepCosts, replay
from tests.peers.texts import Text

COSTS = StepCosts(0.01, 0.012, 0.0001)
SOURCES = [NgramConfig(kind="ngram", max_draft_len=8)]


def copying(seed: int) -> Text:
    """A prompt that the answer repeats twice."""
    part = np.random.default_rng(seed).integers(10, 1000, 40)
    return Text(str(seed), np.tile(part, 3).astype(np.int32), 40)


ANSWERS = [copying(seed) for seed in range(9)]
NUM_TOKENS = 9 * 79
"""Tokens that steps write. The prompt's step writes the first token of an answer."""


def test_each_token_is_written_once_and_every_step_costs_time() -> None:
    result = replay(Ours(SOURCES, 1), ANSWERS, 1, COSTS)
    assert result["steps"] + result["accepted"] == NUM_TOKENS
    num_plain = result["steps"] - result["drafts"]
    seconds = num_plain * COSTS.plain + result["drafts"] * COSTS.base
    seconds += result["drafted"] * COSTS.slope
    assert result["tokens_per_second"] == pytest.approx(NUM_TOKENS / seconds)


def test_perfect_drafts_are_never_wrong_and_never_slower() -> None:
    ours = replay(Ours(SOURCES, 3), ANSWERS, 3, COSTS)
    perfect = replay(Perfect(SOURCES, 3, COSTS), ANSWERS, 3, COSTS)
    assert perfect["drafted"] == perfect["accepted"] > 0
    assert ours["drafted"] > 0
    assert perfect["tokens_per_second"] >= ours["tokens_per_second"]


def test_perfect_sends_no_draft_that_costs_more_than_it_saves() -> None:
    dear = StepCosts(0.01, 0.2, 0.01)
    assert replay(Perfect(SOURCES, 1, dear), ANSWERS, 1, dear)["drafts"] == 0
