from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specserve.core.compile import kernel
from specserve.policy.acceptance import (
    LEAST_SURVIVAL,
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


class Judge:
    """What is expected of drafts, and what the target wrote then."""

    def __init__(self, num_sources: int = 1) -> None:
        self.acceptance = Acceptance(num_sources, NUM_SLOTS, LONGEST)
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
        """Of a draft that is not learned from, in a text that ends with 0."""
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


def test_what_is_accepted_becomes_likely_and_what_is_refused_unlikely() -> None:
    judge = Judge()
    before = judge.expected()
    judge.teach((1, 2, 9))
    after = judge.expected()
    assert after[0] > before[0]
    assert after[2] < before[2]


def test_a_draft_that_was_not_sent_teaches_as_far_as_the_targets_text_is_known() -> None:
    judge = Judge()
    before = judge.expected(slot=5)
    judge.teach((1,))
    after = judge.expected(slot=5)
    assert after[0] > before[0]
    assert after[3] / after[2] >= before[3] / before[2]
    never_offered = (1, 6, 7, 8)
    assert judge.expected(slot=5, draft=never_offered) == after


def test_tokens_after_a_refused_one_teach_nothing() -> None:
    judge, other = Judge(), Judge()
    judge.teach((9, 2, 3, 4))
    other.teach((9, 8, 8, 8))
    assert judge.expected() == other.expected()


def test_survival_falls_along_a_draft_and_ends_where_nothing_is_to_be_expected() -> None:
    judge = Judge()
    judge.teach((9,), times=200)
    found = judge.expected()
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0.0
    assert all(each == 0.0 or each >= LEAST_SURVIVAL for each in found)


def test_a_source_is_believed_at_first_and_judged_by_tokens_of_about_the_same_confidence() -> None:
    judge = Judge()
    assert judge.expected(confidence=0.95)[0] > judge.expected(confidence=0.4)[0]
    judge.teach((9,), confidence=0.95, times=60)
    judge.teach((1, 2, 3, 4, 5), slot=1, confidence=0.4, times=60)
    fresh = 2
    assert judge.expected(fresh, confidence=0.95)[0] < judge.expected(fresh, confidence=0.4)[0]


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_a_source_may_be_as_sure_as_can_be(confidence: float) -> None:
    judge = Judge()
    judge.teach((1, 2, 9), confidence=confidence)
    assert 0.0 <= judge.expected(confidence=confidence)[0] <= 1.0


def test_a_request_that_refuses_lowers_its_own_expectations_more_than_the_others() -> None:
    judge = Judge()
    judge.teach((1, 2, 3, 4, 5), slot=1)
    judge.teach((9,), slot=0)
    assert judge.expected(slot=0)[0] < 0.7 * judge.expected(slot=1)[0]


def test_another_request_in_the_slot_starts_from_what_all_have_taught() -> None:
    judge = Judge()
    judge.teach((1, 2, 3, 4, 5), slot=1)
    judge.teach((9,), slot=0)
    judge.acceptance.open(0, "")
    assert judge.expected(slot=0) == judge.expected(slot=2)


def test_sources_are_told_apart() -> None:
    judge = Judge(num_sources=2)
    other = (5, 6, 7, 8)
    before = judge.expected(source=1, draft=other)
    judge.teach((9,), source=0)
    assert judge.expected(source=1, draft=other) == before
    assert judge.expected(slot=1, source=0, draft=other)[0] < before[0]


def test_what_is_known_of_a_token_and_of_a_pair_holds_for_all_sources_and_requests() -> None:
    judge = Judge(num_sources=2)
    judge.teach((1, 2, 9), source=0)
    of_new = judge.expected(slot=1, source=1, draft=(5, 6, 7, 8))
    assert judge.expected(slot=1, source=1, draft=(1, 6, 7, 8))[0] > of_new[0]
    assert judge.expected(slot=1, source=1, draft=(3, 6, 7, 8))[0] < of_new[0]
    behind_2 = judge.expected(slot=1, source=1, draft=(2, 3, 7, 8))
    behind_6 = judge.expected(slot=1, source=1, draft=(6, 3, 7, 8))
    assert behind_2[1] / behind_2[0] < behind_6[1] / behind_6[0]


def test_where_sources_that_disagree_are_wrong_those_that_agree_are_believed() -> None:
    judge = Judge(num_sources=2)
    for _ in range(40):
        judge.offer(draft=(1, 2, 3, 4))
        judge.offer(source=1, draft=(5, 6, 7, 8))
        judge.write(9)
        judge.offer(draft=(11, 12, 13, 14))
        judge.offer(source=1, draft=(11, 12, 13, 14))
        judge.write(11, 12, 13, 14)
    first, agreed = (21, 22, 23, 24), judge.acceptance.offers(1)
    alone = judge.expected(slot=1, draft=first)[0]
    judge.offer(slot=1, source=1, draft=first)
    assert judge.expected(slot=1, draft=first)[0] > alone
    agreed.tokens[1, :4] = (31, 32, 33, 34)
    assert judge.expected(slot=1, draft=first)[0] < alone


def test_a_tenant_learns_nothing_from_what_is_accepted_of_anothers_drafts() -> None:
    judge = Judge()
    for slot, tenant in enumerate(("a", "b", "c", "a")):
        judge.acceptance.open(slot, tenant)
    before = judge.expected(slot=1)
    judge.teach((9,), slot=0)
    assert judge.expected(slot=1) == judge.expected(slot=2) == before
    assert judge.expected(slot=3)[0] < before[0]


def test_what_is_not_known_of_a_confidence_is_taken_from_what_the_source_was_worth() -> None:
    judge = Judge()
    before = judge.expected(slot=1, confidence=0.9)
    judge.teach((9,), confidence=0.3, times=100)
    assert judge.expected(slot=1, confidence=0.9)[0] < before[0]


def test_drafts_that_are_not_there_yet_are_judged_by_position() -> None:
    judge = Judge()
    judge.teach((1, 2, 9), times=100)
    survival = np.zeros((1, LONGEST))
    unseen_survival(judge.acceptance.state, 0, np.array([1]), survival)
    assert survival[0, 1] > 0.8
    assert survival[0, 2] < 0.1


def test_old_observations_count_less() -> None:
    judge = Judge()
    judge.teach((9,), times=3000)
    judge.teach((1, 2, 3, 4, 5), slot=1, times=1500)
    assert judge.expected(slot=2)[0] > 0.6


def test_a_step_without_new_tokens_teaches_nothing_and_offers_stay() -> None:
    judge = Judge()
    judge.offer()
    before = judge.survival()
    assert judge.write() == 1
    assert judge.survival() == before
    assert judge.write(1) == 0
    assert judge.survival() == []


def test_of_a_draft_only_what_is_of_use_is_judged() -> None:
    judge = Judge()
    judge.offer()
    assert judge.survival(limit=2) == judge.survival()[:2]
    assert judge.survival(limit=0) == []


@pytest.mark.parametrize(("confidence", "written", "most"), [(0.1, (9,), 0.1), (1.0, (1, 9), 1.0)])
def test_drafts_that_are_not_there_yet_are_judged_by_what_comes_now(
    confidence: float, written: Sequence[int], most: float
) -> None:
    judge = Judge()
    for level in np.linspace(0.05, 0.99, 24):
        judge.teach((1, 9), 300, confidence=float(level))
        judge.teach((9,), 300, confidence=float(level))
    judge.teach(written, 4000, confidence=confidence)
    judge.acceptance.open(0, "")
    unseen = np.zeros((1, LONGEST))
    unseen_survival(judge.acceptance.state, 0, np.array([0]), unseen)
    assert most - 0.1 <= unseen[0, 0] <= most
