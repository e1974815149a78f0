from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specserve.sources.followed_texts import (
    ANSWERED_STEPS,
    ASKED_STEPS,
    FOLLOWED_STEPS,
    FollowedTexts,
)

SLOTS = np.arange(3)


def steps(
    texts: FollowedTexts,
    count: int,
    *asked: int,
    reading: Sequence[int] = (),
    is_there: bool = True,
) -> None:
    for _ in range(count):
        texts.note(np.array(asked, np.int64), np.array(reading, np.int64), is_there=is_there)


@pytest.fixture
def texts() -> FollowedTexts:
    """Texts of a source that is up and was not asked yet."""
    made = FollowedTexts(3, always=False)
    for slot in range(3):
        made.open(slot)
    steps(made, 1)
    return made


def test_the_first_text_is_followed_and_then_one_text_for_each_probe(
    texts: FollowedTexts,
) -> None:
    texts.open(1)
    texts.open(2)
    assert texts.which(SLOTS).tolist() == [False, True, False]
    texts.close(np.array([1]))
    texts.open(0)
    assert not texts.which(SLOTS).any()
    texts.follow_next()
    assert not texts.which(SLOTS).any()
    texts.open(2)
    texts.open(1)
    assert texts.which(SLOTS).tolist() == [False, False, True]


def test_the_texts_of_the_last_request_for_drafts_are_followed(texts: FollowedTexts) -> None:
    texts.open(1)
    steps(texts, 1, 0, 2)
    steps(texts, 5)
    assert texts.which(SLOTS).tolist() == [True, False, True]
    steps(texts, 1, 1)
    assert texts.which(SLOTS).tolist() == [False, True, False]


def test_a_text_is_followed_while_the_drafter_reads_it(texts: FollowedTexts) -> None:
    steps(texts, 1, 0)
    steps(texts, ASKED_STEPS + 100, reading=[0])
    steps(texts, 1, 2, reading=[0])
    assert texts.which(SLOTS).tolist() == [True, False, True]
    steps(texts, ASKED_STEPS, reading=[0])
    assert texts.which(SLOTS).tolist() == [True, False, False]
    steps(texts, ANSWERED_STEPS)
    assert not texts.which(SLOTS).any()


def test_all_texts_are_followed_while_the_source_is_in_use(texts: FollowedTexts) -> None:
    steps(texts, 10, 1)
    assert texts.which(SLOTS).all()
    steps(texts, ASKED_STEPS - 1)
    assert texts.which(SLOTS).tolist() == [False, True, False]


def test_all_texts_are_followed_during_a_short_drafter_outage(texts: FollowedTexts) -> None:
    steps(texts, 20, 1)
    steps(texts, 50, 1, is_there=False)
    assert texts.are_all
    steps(texts, 1000, 1, is_there=False)
    assert not texts.are_all


def test_all_texts_of_a_fixed_source_are_followed_while_it_is_up() -> None:
    texts = FollowedTexts(3, always=True)
    for slot in range(3):
        texts.open(slot)
    assert not texts.which(SLOTS).any()
    steps(texts, 1)
    assert texts.which(SLOTS).all()


def test_a_text_is_followed_for_a_limited_number_of_steps(
    texts: FollowedTexts,
) -> None:
    steps(texts, 1, 0)
    steps(texts, ASKED_STEPS - 1)
    assert texts.which(SLOTS).tolist() == [True, False, False]
    steps(texts, 1)
    assert not texts.which(SLOTS).any()
    steps(texts, 1, 0)
    texts.answered()
    steps(texts, ANSWERED_STEPS - 1)
    assert texts.which(SLOTS).tolist() == [True, False, False]
    steps(texts, 1)
    assert not texts.which(SLOTS).any()
    texts.follow_next()
    texts.open(2)
    steps(texts, FOLLOWED_STEPS - 1)
    assert texts.which(SLOTS).tolist() == [False, False, True]
    steps(texts, 1)
    assert not texts.which(SLOTS).any()
