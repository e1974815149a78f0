from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specserve.core.compile import kernel
from specserve.policy.acceptance import (
    MIN_SURVIVAL,
    Acceptance,
    learn,
    survival_of,
    unseen_survival,
)

NUM_SLOTS, LONGEST = 8, 8
DRAFT = (1, 2, 3, 4)


@kernel
def survival(a, slots, limits, found, lengths):  # type: ignore[no-untyped-def]
    survival_of(a, slots, limits, found, lengths)


@kernel
def observe(a, slots, token_ids, num_tokens, num_new):  # type: ignore[no-untyped-def]
    return learn(a, slots, token_ids, num_tokens, num_new)


class Learner:
    """Offers drafts, writes the target's tokens and reads the estimates."""

    def __init__(self, num_sources: int = 1) -> None:
        self.acceptance = Acceptance([1] * num_sources, NUM_SLOTS, LONGEST, 100)
        self.num_sources = num_sources

    def offer(
        self,
        slot: int = 0,
        source: int = 0,
        confidence: float = 0.7,
        draft: Sequence[int] = DRAFT,
    ) -> None:
        tokens, lengths, confidences, _ = self.acceptance.offers(source)
        tokens[slot, :4], lengths[slot], confidences[slot] = draft, 4, confidence

    def survival(self, slot: int = 0, source: int = 0, limit: int = LONGEST) -> list[float]:
        found = np.zeros((self.num_sources, 1, LONGEST))
        lengths = np.zeros((self.num_sources, 1), np.int32)
        limits = np.full_like(lengths, limit)
        survival(self.acceptance.state, np.array([slot]), limits, found, lengths)
        return found[source, 0, : lengths[source, 0]].tolist()  # type: ignore[no-any-return]

    def expected(self, slot: int = 0, source: int = 0, **of: Any) -> list[float]:
        """Survival of a draft in a text that ends with 0. Nothing is learned from the draft."""
        self.acceptance.state.last[slot] = 0
        self.offer(slot, source, **of)
        found = self.survival(slot, source)
        self.acceptance.offers(source).lengths[slot] = 0
        return found

    def write(self, *tokens: int, slot: int = 0) -> int:
        text = np.zeros((1, 32), np.int32)
        text[0, 16 - len(tokens) : 16] = tokens
        counts = np.array([16], np.int32), np.array([len(tokens)], np.int32)
        return int(observe(self.acceptance.state, np.array([slot]), text, *counts))

    def teach(self, written: Sequence[int], times: int = 20, **of: float) -> None:
        for _ in range(times):
            self.offer(**of)  # type: ignore[arg-type]
            self.write(*written, slot=int(of.get("slot", 0)))


def test_accepted_tokens_become_likely_and_refused_ones_unlikely() -> None:
    learner = Learner()
    before = learner.expected()
    learner.teach((1, 2, 9))
    after = learner.expected()
    assert after[0] > before[0]
    assert after[2] < before[2]


def test_an_unsent_draft_teaches_up_to_the_end_of_the_targets_text() -> None:
    learner = Learner()
    before = learner.expected(slot=5)
    learner.teach((1,))
    after = learner.expected(slot=5)
    assert after[0] > before[0]
    assert after[3] / after[2] >= before[3] / before[2]
    never_offered = (1, 6, 7, 8)
    assert learner.expected(slot=5, draft=never_offered) == after


def test_tokens_after_a_refused_one_teach_nothing() -> None:
    learner, other = Learner(), Learner()
    learner.teach((9, 2, 3, 4))
    other.teach((9, 8, 8, 8))
    assert learner.expected() == other.expected()


def test_survival_falls_along_a_draft_and_is_zero_below_the_least() -> None:
    learner = Learner()
    learner.teach((9,), times=200)
    found = learner.expected()
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0.0
    assert all(each == 0.0 or each >= MIN_SURVIVAL for each in found)


def test_confidence_is_trusted_until_outcomes_at_the_same_level_disagree() -> None:
    learner = Learner()
    assert learner.expected(confidence=0.95)[0] > learner.expected(confidence=0.4)[0]
    learner.teach((9,), confidence=0.95, times=60)
    learner.teach((1, 2, 3, 4, 5), slot=1, confidence=0.4, times=60)
    fresh = 2
    assert learner.expected(fresh, confidence=0.95)[0] < learner.expected(fresh, confidence=0.4)[0]


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_confidence_may_be_zero_or_one(confidence: float) -> None:
    learner = Learner()
    learner.teach((1, 2, 9), confidence=confidence)
    assert 0.0 <= learner.expected(confidence=confidence)[0] <= 1.0


def test_a_refusal_lowers_the_estimates_of_its_own_request_most() -> None:
    learner = Learner()
    learner.teach((1, 2, 3, 4, 5), slot=1)
    learner.teach((9,), slot=0)
    assert learner.expected(slot=0)[0] < 0.7 * learner.expected(slot=1)[0]


def test_a_slots_next_request_starts_from_the_estimates_of_all() -> None:
    learner = Learner()
    learner.teach((1, 2, 3, 4, 5), slot=1)
    learner.teach((9,), slot=0)
    learner.acceptance.open(0, "")
    assert learner.expected(slot=0) == learner.expected(slot=2)


def test_each_source_has_its_own_estimates() -> None:
    learner = Learner(num_sources=2)
    other = (5, 6, 7, 8)
    before = learner.expected(source=1, draft=other)
    learner.teach((9,), source=0)
    assert learner.expected(source=1, draft=other) == before
    assert learner.expected(slot=1, source=0, draft=other)[0] < before[0]


def test_estimates_of_a_token_and_of_a_pair_hold_for_all_sources_and_requests() -> None:
    learner = Learner(num_sources=2)
    learner.teach((1, 2, 9), source=0)
    of_new = learner.expected(slot=1, source=1, draft=(5, 6, 7, 8))
    assert learner.expected(slot=1, source=1, draft=(1, 6, 7, 8))[0] > of_new[0]
    assert learner.expected(slot=1, source=1, draft=(3, 6, 7, 8))[0] < of_new[0]
    behind_2 = learner.expected(slot=1, source=1, draft=(2, 3, 7, 8))
    behind_6 = learner.expected(slot=1, source=1, draft=(6, 3, 7, 8))
    assert behind_2[1] / behind_2[0] < behind_6[1] / behind_6[0]


def test_sources_that_agree_are_trusted_where_disagreeing_ones_were_wrong() -> None:
    learner = Learner(num_sources=2)
    for _ in range(40):
        learner.offer(draft=(1, 2, 3, 4))
        learner.offer(source=1, draft=(5, 6, 7, 8))
        learner.write(9)
        learner.offer(draft=(11, 12, 13, 14))
        learner.offer(source=1, draft=(11, 12, 13, 14))
        learner.write(11, 12, 13, 14)
    first, agreed = (21, 22, 23, 24), learner.acceptance.offers(1)
    alone = learner.expected(slot=1, draft=first)[0]
    learner.offer(slot=1, source=1, draft=first)
    assert learner.expected(slot=1, draft=first)[0] > alone
    agreed.tokens[1, :4] = (31, 32, 33, 34)
    assert learner.expected(slot=1, draft=first)[0] < alone


def test_a_tenants_estimates_ignore_the_outcomes_of_other_tenants() -> None:
    learner = Learner()
    for slot, tenant in enumerate(("a", "b", "c", "a")):
        learner.acceptance.open(slot, tenant)
    before = learner.expected(slot=1)
    learner.teach((9,), slot=0)
    assert learner.expected(slot=1) == learner.expected(slot=2) == before
    assert learner.expected(slot=3)[0] < before[0]


def test_an_unseen_confidence_is_estimated_from_the_sources_other_drafts() -> None:
    learner = Learner()
    before = learner.expected(slot=1, confidence=0.9)
    learner.teach((9,), confidence=0.3, times=100)
    assert learner.expected(slot=1, confidence=0.9)[0] < before[0]


def test_unseen_drafts_are_estimated_by_position() -> None:
    learner = Learner()
    learner.teach((1, 2, 9), times=100)
    survival = np.zeros((1, LONGEST))
    unseen_survival(learner.acceptance.state, 0, np.array([1]), survival)
    assert survival[0, 1] > 0.8
    assert survival[0, 2] < 0.1


def test_old_observations_count_less() -> None:
    learner = Learner()
    learner.teach((9,), times=3000)
    learner.teach((1, 2, 3, 4, 5), slot=1, times=1500)
    assert learner.expected(slot=2)[0] > 0.6


def test_a_longer_run_of_right_drafts_does_not_delay_learning() -> None:
    learner, longer = Learner(), Learner()
    for each, times in ((learner, 3_000), (longer, 30_000)):
        each.teach((1, 2, 3, 4, 5), times=times)
        each.teach((9,), slot=1)
    assert longer.expected(slot=1)[0] == pytest.approx(learner.expected(slot=1)[0], abs=0.05)


def test_a_step_without_new_tokens_teaches_nothing_and_keeps_offers() -> None:
    learner = Learner()
    learner.offer()
    before = learner.survival()
    assert learner.write() == 1
    assert learner.survival() == before
    assert learner.write(1) == 0
    assert learner.survival() == []


def test_no_token_beyond_the_limit_is_estimated() -> None:
    learner = Learner()
    learner.offer()
    assert learner.survival(limit=2) == learner.survival()[:2]
    assert learner.survival(limit=0) == []


@pytest.mark.parametrize(("confidence", "written", "most"), [(0.1, (9,), 0.1), (1.0, (1, 9), 1.0)])
def test_unseen_drafts_are_estimated_from_recent_confidences(
    confidence: float, written: Sequence[int], most: float
) -> None:
    learner = Learner()
    for level in np.linspace(0.05, 0.99, 24):
        learner.teach((1, 9), 300, confidence=float(level))
        learner.teach((9,), 300, confidence=float(level))
    learner.teach(written, 4000, confidence=confidence)
    learner.acceptance.open(0, "")
    unseen = np.zeros((1, LONGEST))
    unseen_survival(learner.acceptance.state, 0, np.array([0]), unseen)
    assert most - 0.1 <= unseen[0, 0] <= most
