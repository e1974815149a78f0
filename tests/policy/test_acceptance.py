from __future__ import annotations

from itertools import pairwise

import pytest
from specserve.sources.acceptance import LEAST_LIKELY, Acceptance

from specserve.core.types import Draft

DRAFT = Draft((1, 2, 3, 4), "ngram", 3)


def taught(num_accepted: int, times: int = 300, request: str = "teacher") -> Acceptance:
    acceptance = Acceptance()
    for _ in range(times):
        observe(acceptance, request, DRAFT, num_accepted)
    return acceptance


def observe(acceptance: Acceptance, request: str, draft: Draft, num_right: int) -> None:
    acceptance.observe(request, draft, (*draft.tokens[:num_right], -1))


def chances(acceptance: Acceptance, request: str, draft: Draft = DRAFT) -> list[float]:
    gains = acceptance.prefix_probabilities(request, draft)
    return gains + [0.0] * (len(draft.tokens) - len(gains))


def first(acceptance: Acceptance, request: str, draft: Draft = DRAFT) -> float:
    return chances(acceptance, request, draft)[0]


def test_what_is_accepted_becomes_likely_and_what_is_refused_unlikely() -> None:
    gains = chances(taught(2), "new")
    assert gains[1] > 0.9
    assert gains[2] < 0.05


def test_tokens_after_a_refused_one_teach_nothing() -> None:
    before, after = (chances(each, "new") for each in (Acceptance(), taught(0, times=20)))
    assert after[0] < before[0]
    assert after[2] / after[1] == pytest.approx(before[2] / before[1])


def test_chances_fall_along_a_draft_and_end_where_nothing_is_to_be_expected() -> None:
    gains = taught(4).prefix_probabilities("new", Draft(tuple(range(200)), "ngram", 3))
    assert all(later < earlier for earlier, later in pairwise(gains))
    assert 4 < len(gains) < 200
    assert gains[-1] >= LEAST_LIKELY
    assert taught(0).prefix_probabilities("new", DRAFT) == []


def test_a_request_that_refuses_lowers_its_own_chances_more_than_the_others() -> None:
    acceptance = Acceptance()
    for _ in range(30):
        observe(acceptance, "good", DRAFT, 4)
        observe(acceptance, "bad", DRAFT, 0)
    good, bad, new = (first(acceptance, request) for request in ("good", "bad", "new"))
    assert bad < new < good


def test_what_a_request_refuses_of_one_source_says_nothing_of_another() -> None:
    mtp = Draft((1, 2, 3, 4), "mtp")
    acceptance = Acceptance()
    for _ in range(100):
        observe(acceptance, "teacher", DRAFT, 2)
        observe(acceptance, "teacher", mtp, 2)
    before = first(acceptance, "a", mtp)
    observe(acceptance, "a", DRAFT, 0)
    assert first(acceptance, "a") < first(acceptance, "new")
    assert first(acceptance, "a", mtp) == before


def test_a_longer_match_is_more_likely_before_anything_is_known() -> None:
    short, long = (first(Acceptance(), "a", Draft((1,), "ngram", size)) for size in (2, 6))
    assert short < long


def test_a_source_that_says_how_sure_it_is_is_believed_at_first() -> None:
    for chance in (0.35, 0.7, 0.9):
        assert first(Acceptance(), "a", Draft((1,), "mtp", chances=(chance,))) == pytest.approx(
            chance, abs=0.1
        )


def test_a_token_is_judged_by_those_of_which_its_source_was_as_sure() -> None:
    acceptance = Acceptance()
    for _ in range(300):
        observe(acceptance, "teacher", Draft((1, 2), "mtp", chances=(0.9, 0.4)), 1)
    sure, unsure = (Draft((1,), "mtp", chances=(chance,)) for chance in (0.9, 0.4))
    assert first(acceptance, "new", sure) > 0.9
    # In the first position it was never seen unsure, and so is believed.
    assert first(acceptance, "new", unsure) == pytest.approx(0.4, abs=0.1)
    assert chances(acceptance, "new", Draft((1, 2), "mtp", chances=(0.9, 0.4)))[1] < 0.05


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            Draft((1,) * 3, "trie_local", 6, (0.9,) * 3),
            Draft((1,) * 12, "trie_local", 6, (0.9,) * 12),
        ),
        (
            Draft((1,) * 3, "trie_local", 20, (0.9,) * 3),
            Draft((1,) * 3, "trie_local", 2, (0.9,) * 3),
        ),
    ],
)
def test_drafts_of_which_a_source_is_as_sure_are_told_apart_by_length_and_match(
    right: Draft, wrong: Draft
) -> None:
    acceptance = Acceptance()
    for teacher in range(100):
        observe(acceptance, f"right{teacher}", right, 3)
        observe(acceptance, f"wrong{teacher}", wrong, 0)
    assert first(acceptance, "new", right) > 0.9
    assert first(acceptance, "new", wrong) < 0.1


def test_before_a_source_is_asked_it_is_judged_by_all_its_drafts() -> None:
    acceptance = Acceptance()
    for _ in range(300):
        for chance, num_accepted in ((0.9, 1), (0.4, 0)):
            draft = Draft((1,), "mtp", chances=(chance,))
            observe(acceptance, "teacher", draft, num_accepted)
    assert first(acceptance, "new", Draft((1,), "mtp")) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_a_source_may_be_as_sure_as_can_be(chance: float) -> None:
    assert (
        len(
            Acceptance().prefix_probabilities(
                "a", Draft((1,) * 200, "mtp", chances=(chance,) * 200)
            )
        )
        < 200
    )


def test_what_was_never_seen_of_a_source_is_judged_by_what_it_was_worth_altogether() -> None:
    longer = Draft((1, 2), "ngram", 6)
    assert first(taught(0, times=30), "new", longer) < 0.5 * first(Acceptance(), "new", longer)
    acceptance = taught(0, times=30)
    for _ in range(30):
        acceptance.observe("teacher", longer, (1, 2))
    assert first(acceptance, "new", longer) > 0.8


def test_sources_are_told_apart() -> None:
    other = Draft((1, 2, 3, 4), "mtp", 3)
    acceptance = taught(0)
    assert first(acceptance, "new") < 0.1 < first(acceptance, "new", other)


def test_a_forgotten_request_starts_from_the_shared_rates() -> None:
    acceptance = taught(0, times=10, request="bad")
    before = first(acceptance, "bad")
    acceptance.forget(["bad", "unknown"])
    assert first(acceptance, "bad") > before


def test_a_draft_teaches_as_far_as_the_targets_text_is_known() -> None:
    whole, known = Acceptance(), Acceptance()
    whole.observe("a", DRAFT, (1, 2))
    known.observe("a", DRAFT.cut(2), (1, 2, 3))
    assert whole.prefix_probabilities("new", DRAFT) == known.prefix_probabilities("new", DRAFT)
    whole.observe("a", DRAFT, (1, 9))
    assert whole.prefix_probabilities("new", DRAFT) != known.prefix_probabilities("new", DRAFT)
    known.observe("a", DRAFT, (1, 9, 3, 4))
    assert whole.prefix_probabilities("new", DRAFT) == known.prefix_probabilities("new", DRAFT)


def test_a_tenant_learns_nothing_from_what_is_accepted_of_anothers_drafts() -> None:
    acceptance, alone = Acceptance(), Acceptance()
    for each in (acceptance, alone):
        each.assign("mine", "team-a")
    acceptance.assign("theirs", "team-b")
    for _ in range(300):
        observe(acceptance, "theirs", DRAFT, 4)
    assert chances(acceptance, "mine") == chances(alone, "mine")
    assert first(acceptance, "theirs") > 0.9


@pytest.mark.parametrize("is_judged", [True, False])
def test_a_source_is_learned_of_alike_whether_its_drafts_are_judged_or_not(is_judged: bool) -> None:
    acceptance = Acceptance()
    for step in range(300):
        acceptance.begin_step()
        observe(acceptance, "a", DRAFT, 1 if step % 5 == 0 else 0)
        if is_judged:
            acceptance.prefix_probabilities("a", DRAFT)
    assert first(acceptance, "a") == pytest.approx(0.2, abs=0.1)
    assert first(acceptance, "new") == pytest.approx(0.2, abs=0.05)


def test_a_step_without_new_tokens_teaches_nothing() -> None:
    acceptance, sure = Acceptance(), Draft((1, 2), "mtp", chances=(0.9, 0.4))
    acceptance.observe("a", sure, ())
    assert acceptance.prefix_probabilities("a", sure) == Acceptance().prefix_probabilities(
        "a", sure
    )


def test_what_was_said_of_a_draft_does_not_outlive_what_is_learned() -> None:
    acceptance, draft = Acceptance(), Draft((1, 2, 3), "ngram", 3)
    before = list(acceptance.prefix_probabilities("a", draft))
    assert acceptance.prefix_probabilities("a", draft) == before
    acceptance.observe("a", draft, (1, 2, 3, 4))
    after = acceptance.prefix_probabilities("a", draft)
    assert sum(after) > sum(before)
    assert sum(acceptance.prefix_probabilities("b", draft)) < sum(
        after
    )  # another request's own factor
