from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specserve.core.types import Drafts, Float64Array
from specserve.policy.acceptance import LEAST_SURVIVAL, Acceptance
from tests.draft_batches import draft_batch

NUM_SLOTS, LONGEST = 4, 8
DRAFT = (1, 2, 3, 4)
WRONG = 9
TEACHER, NEW = 0, 1


def fresh(num_sources: int = 1) -> Acceptance:
    acceptance = Acceptance(num_sources, NUM_SLOTS, LONGEST)
    for slot in (TEACHER, NEW):
        acceptance.open(slot, "")
    return acceptance


def offer(
    acceptance: Acceptance,
    slot: int,
    draft: Sequence[int] = DRAFT,
    confidence: float | Sequence[float] = 0.5,
    source: int = 0,
) -> None:
    drafts = Drafts.empty(1, LONGEST)
    drafts.tokens[0, : len(draft)] = draft
    drafts.confidence[0, : len(draft)] = confidence
    drafts.lengths[0] = len(draft)
    acceptance.offer(source, np.array([slot]), drafts)


def write(acceptance: Acceptance, slot: int, *new: int) -> None:
    """A step of a request, after three tokens of its prompt."""
    batch = draft_batch({slot: [7, 7, 7, *new]})
    num_new = np.array([len(new)], np.int32)
    acceptance.observe(batch.slots, batch.token_ids, batch.num_tokens, num_new)


def teach(
    acceptance: Acceptance,
    num_right: int,
    times: int = 300,
    slot: int = TEACHER,
    draft: Sequence[int] = DRAFT,
    confidence: float | Sequence[float] = 0.5,
    source: int = 0,
) -> Acceptance:
    for _ in range(times):
        offer(acceptance, slot, draft, confidence, source)
        write(acceptance, slot, *draft[:num_right], WRONG)
    return acceptance


def survivals(acceptance: Acceptance, slot: int, source: int = 0) -> list[float]:
    """Of the draft that is offered."""
    slots = np.array([slot])
    survival = np.full((len(acceptance.tokens), 1, LONGEST), np.nan)
    lengths = np.zeros((len(acceptance.tokens), 1), np.int32)
    acceptance.survival(slots, survival, lengths)
    return [float(each) for each in survival[source, 0, : lengths[source, 0]]]


def judged(
    acceptance: Acceptance,
    slot: int = NEW,
    draft: Sequence[int] = DRAFT,
    confidence: float | Sequence[float] = 0.5,
    source: int = 0,
) -> list[float]:
    offer(acceptance, slot, draft, confidence, source)
    found = survivals(acceptance, slot, source)
    acceptance.withdraw(np.array([slot]))
    return found


def unseen(acceptance: Acceptance, slot: int, source: int = 0) -> Float64Array:
    survival = np.zeros((1, LONGEST))
    acceptance.unseen_survival(source, np.array([slot]), survival)
    return survival[0]


def test_what_is_accepted_becomes_likely_and_what_is_refused_unlikely() -> None:
    found = judged(teach(fresh(), 2))
    assert found[1] > 0.9
    assert found[2] < 0.05


def test_survival_falls_along_a_draft_and_ends_where_nothing_is_to_be_expected() -> None:
    found = judged(teach(fresh(), 1), draft=range(LONGEST))
    assert found == sorted(found, reverse=True)
    assert all(each == 0 or each >= LEAST_SURVIVAL for each in found)
    assert found[-1] == 0


def test_tokens_after_a_wrong_one_teach_nothing() -> None:
    before, after = judged(fresh()), judged(teach(fresh(), 0, times=1), slot=NEW)
    assert after[0] < before[0]
    # What was not reached is believed as before, but for what the source is worth at first tokens.
    assert after[1] / after[0] == pytest.approx(before[1] / before[0])


@pytest.mark.parametrize("num_new", [1, 2])
def test_a_draft_teaches_as_far_as_the_target_has_written(num_new: int) -> None:
    whole, known = fresh(), fresh()
    for _ in range(30):
        offer(whole, TEACHER, DRAFT)
        offer(known, TEACHER, DRAFT[:num_new])
        for each in (whole, known):
            write(each, TEACHER, *DRAFT[:num_new])
    assert judged(whole) == judged(known)


def test_drafts_that_were_not_sent_are_learned_from_by_the_targets_text() -> None:
    acceptance = fresh(num_sources=2)
    for _ in range(100):
        offer(acceptance, TEACHER, (5, 6, 7), source=0)
        offer(acceptance, TEACHER, (1, 2, 8), source=1)
        write(acceptance, TEACHER, 1, 2, WRONG)
    assert judged(acceptance, source=0)[0] < 0.05
    assert judged(acceptance, source=1)[1] > 0.9


@pytest.mark.parametrize("confidence", [0.3, 0.7, 0.9])
def test_a_source_is_believed_before_anything_is_known(confidence: float) -> None:
    assert judged(fresh(), confidence=confidence)[0] == pytest.approx(confidence, abs=0.06)


def test_confidence_is_worth_what_it_was_before() -> None:
    acceptance = fresh()
    for _ in range(150):
        teach(acceptance, 0, 1, confidence=0.9)
        teach(acceptance, 1, 1, confidence=0.5)
    assert judged(acceptance, confidence=0.9)[0] < 0.2
    assert judged(acceptance, confidence=0.5)[0] > 0.8


def test_an_unseen_confidence_is_judged_by_what_the_source_was_worth_altogether() -> None:
    acceptance = teach(fresh(), 0, times=100, confidence=0.9)
    assert judged(acceptance, confidence=0.5)[0] < 0.2


def test_a_request_that_refuses_lowers_its_own_chances_more_than_the_others() -> None:
    acceptance = fresh()
    bad = 2
    acceptance.open(bad, "")
    for _ in range(30):
        teach(acceptance, 4, 1, slot=TEACHER)
        teach(acceptance, 0, 1, slot=bad)
    good, other, refusing = (judged(acceptance, slot)[0] for slot in (TEACHER, NEW, bad))
    assert refusing < 0.6 * other
    assert other < good


def test_a_request_is_judged_by_each_source_apart() -> None:
    acceptance = fresh(num_sources=2)
    for source in (0, 1):
        teach(acceptance, 2, source=source)
    before = judged(acceptance, NEW, source=1)
    teach(acceptance, 0, 5, slot=NEW, source=0)
    assert judged(acceptance, NEW, source=0)[0] < before[0]
    assert judged(acceptance, NEW, source=1) == before


def test_the_next_request_of_a_slot_begins_with_what_is_known_of_all() -> None:
    acceptance = teach(fresh(), 0, times=20)
    offer(acceptance, TEACHER)
    acceptance.open(TEACHER, "")
    assert not acceptance.has_offers(np.array([TEACHER]))
    assert judged(acceptance, TEACHER) == judged(acceptance, NEW)


def test_sources_that_change_are_followed() -> None:
    acceptance = teach(fresh(), 4, times=5000)
    teach(acceptance, 0, times=1500)
    assert judged(acceptance)[0] < 0.2


def test_a_tenant_learns_nothing_from_what_is_accepted_of_anothers_drafts() -> None:
    acceptance, alone = fresh(), fresh()
    for each in (acceptance, alone):
        each.open(NEW, "mine")
    for number in range(5):  # more than the arrays began with
        acceptance.open(TEACHER, f"other {number}")
        teach(acceptance, 4, times=50)
    assert judged(acceptance, NEW) == judged(alone, NEW)
    assert (unseen(acceptance, NEW) == unseen(alone, NEW)).all()
    assert judged(acceptance, TEACHER)[0] > 0.9


def test_two_requests_of_different_tenants_are_judged_in_one_call() -> None:
    acceptance = fresh()
    acceptance.open(NEW, "mine")
    teach(acceptance, 4)
    offer(acceptance, TEACHER)
    offer(acceptance, NEW)
    slots, survival, lengths = np.array([TEACHER, NEW]), np.zeros((1, 2, 8)), np.zeros((1, 2))
    acceptance.survival(slots, survival, lengths.astype(np.int32))
    assert [survival[0, row, 0] for row in (0, 1)] == [
        survivals(acceptance, TEACHER)[0],
        survivals(acceptance, NEW)[0],
    ]
    assert survival[0, 1, 0] < 0.6 < 0.9 < survival[0, 0, 0]


def test_offers_wait_for_a_request_without_new_tokens() -> None:
    acceptance = fresh()
    offer(acceptance, TEACHER)
    write(acceptance, TEACHER)
    assert acceptance.has_offers(np.array([NEW, TEACHER]))
    assert not acceptance.has_offers(np.array([NEW]))
    write(acceptance, TEACHER, 1)
    assert not acceptance.has_offers(np.array([TEACHER]))
    assert judged(acceptance)[0] > judged(fresh())[0]


def test_of_sampled_text_the_share_that_is_right_is_learned() -> None:
    acceptance, rng = fresh(), np.random.default_rng(0)
    for _ in range(2000):
        teach(acceptance, int(rng.random() < 0.3), times=1)
    assert judged(acceptance)[0] == pytest.approx(0.3, abs=0.05)


def test_drafts_that_are_not_there_yet_are_judged_by_position() -> None:
    acceptance = teach(fresh(), 2)
    found = unseen(acceptance, NEW)
    assert found[1] > 0.9
    assert found[2] < 0.05
    teach(acceptance, 0, 10, slot=NEW)
    assert unseen(acceptance, NEW)[0] < 0.8 * found[0]


@pytest.mark.parametrize("confidence", [0.0, 1.0])
@pytest.mark.parametrize("num_right", [0, LONGEST])
def test_a_source_may_be_as_sure_and_as_right_as_can_be(confidence: float, num_right: int) -> None:
    acceptance = teach(fresh(), num_right, 2000, draft=range(1, 9), confidence=confidence)
    found = judged(acceptance, TEACHER, draft=range(1, 9), confidence=confidence)
    assert all(0 <= each < 1 for each in found)
    assert found[0] > 0.9 if num_right else found[0] < 0.02
