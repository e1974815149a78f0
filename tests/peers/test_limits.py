"""Drafts of known answers are right, also after a token that rounding changed."""

from __future__ import annotations

from tests.peers.bench_limits import KnownAnswers, summarise

PROMPT, ANSWER = [1, 2], [10, 11, 12, 13, 14, 15, 16, 17]


def drafts(written: list[int], max_draft_len: int = 4) -> list[int]:
    known = KnownAnswers(max_draft_len)
    known.record(PROMPT, ANSWER)
    return known.draft([*PROMPT, *written], len(PROMPT))


def test_the_next_tokens_are_drafted_and_room_is_left_for_the_sampled_one() -> None:
    assert drafts([]) == [10, 11, 12, 13]
    assert drafts([10]) == [11, 12, 13, 14]
    assert drafts([10, 11, 12], 16) == [13, 14, 15, 16]
    assert drafts(ANSWER[:7]) == []


def test_nothing_is_drafted_for_an_unknown_prompt_or_text() -> None:
    assert drafts([10, 11, 99]) == []
    assert KnownAnswers(4).draft([*PROMPT, 10], len(PROMPT)) == []


def test_an_answer_that_lost_or_gained_a_token_is_found_again() -> None:
    assert drafts([10, 12, 13, 14], 2) == [15, 16]
    assert drafts([10, 99, 11, 12, 13], 2) == [14, 15]


def test_the_answer_that_begins_as_the_text_is_drafted() -> None:
    known = KnownAnswers(2)
    for answer in (ANSWER, [10, 20, 12, 13, 21, 22, 23, 24]):
        known.record(PROMPT, answer)
    assert known.draft([*PROMPT, 10, 11, 12, 13], len(PROMPT)) == [14, 15]
    assert known.draft([*PROMPT, 10, 20, 12, 13], len(PROMPT)) == [21, 22]


def test_ratios_are_to_the_best_of_vllm_in_each_turn() -> None:
    turns = {"none": (10, 10), "ngram": (20, 5), "suffix": (5, 40), "ours": (30, 40)}
    found = {
        name: [{"tokens_per_second": speed, "prompt_share": 0.5} for speed in speeds]
        for name, speeds in turns.items()
    }
    ours = summarise(("agent", 8), found)[-1]
    assert ours["each_x_best"] == [1.5, 1.0]
    assert ours["x_best"] == 1.25
