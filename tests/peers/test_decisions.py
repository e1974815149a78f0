"""Recorded answers are drafted for as an engine would have it."""

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
"""That steps write: the first one of an answer comes with its prompt."""


def test_each_token_is_written_once_and_all_steps_are_paid() -> None:
    result = replay(Ours(SOURCES, 1), ANSWERS, 1, COSTS)
    assert result["steps"] + result["accepted"] == NUM_TOKENS
    num_plain = result["steps"] - result["drafts"]
    seconds = num_plain * COSTS.plain + result["drafts"] * COSTS.base
    seconds += result["drafted"] * COSTS.slope
    assert result["tokens_per_second"] == pytest.approx(NUM_TOKENS / seconds)


def test_who_knows_the_answer_sends_nothing_wrong_and_is_at_least_as_fast() -> None:
    ours = replay(Ours(SOURCES, 3), ANSWERS, 3, COSTS)
    perfect = replay(Perfect(SOURCES, 3, COSTS), ANSWERS, 3, COSTS)
    assert perfect["drafted"] == perfect["accepted"] > 0
    assert ours["drafted"] > 0
    assert perfect["tokens_per_second"] >= ours["tokens_per_second"]


def test_who_knows_the_answer_sends_nothing_where_drafts_cost_more_than_they_save() -> None:
    dear = StepCosts(0.01, 0.2, 0.01)
    assert replay(Perfect(SOURCES, 1, dear), ANSWERS, 1, dear)["drafts"] == 0
