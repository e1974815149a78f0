from collections.abc import Sequence
from typing import Any

import pytest

from specserve.compare.lossless import Verdict, first_difference, judge
from specserve.engine.generation import Completion, Job, RunResult


def completion(token_ids: Sequence[int], logprobs: tuple[dict[int, float], ...] = ()) -> Completion:
    return Completion(
        text="",
        token_ids=tuple(token_ids),
        finish_reason="length",
        seconds=1.0,
        token_seconds=(0.1,),
        logprobs=logprobs,
    )


class Scorer:
    """An engine with the same given log-probabilities after any prompt."""

    def __init__(self, logprobs: dict[int, float]) -> None:
        self.logprobs = logprobs
        self.asked: list[Job] = []

    def __call__(self, jobs: list[Job]) -> RunResult:
        self.asked += jobs
        choice = max(self.logprobs, key=lambda token: self.logprobs[token])
        answers = []
        for job in jobs:
            tokens = {choice, *job.sampling.score_token_ids}
            answers.append(completion([choice], ({t: self.logprobs[t] for t in tokens},)))
        return RunResult(completions=tuple(answers), seconds=1.0, drafts=())


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], (1, 2, 3)),
        ([1], [1, 2], (1, None, 2)),
        ([1, 2], [], (0, 1, None)),
        ([], [], None),
    ],
)
def test_the_first_difference_is_a_token_or_an_end(
    left: list[int], right: list[int], found: tuple[int, int | None, int | None] | None
) -> None:
    assert first_difference(left, right) == found


def test_equal_outputs_need_no_engine() -> None:
    scorer = Scorer({})
    verdict = judge([[7]], [completion([1, 2])], [completion([1, 2])], score=scorer, tolerance=0.1)
    assert verdict.is_lossless
    assert verdict.num_identical == 1
    assert scorer.asked == []


def test_the_engine_scores_a_difference_after_the_common_prefix() -> None:
    scorer = Scorer({3: -1.0, 4: -1.05})
    verdict = judge(
        [[7, 8]], [completion([1, 3, 5])], [completion([1, 4, 6])], score=scorer, tolerance=0.1
    )
    (job,) = scorer.asked
    assert job.prompt_token_ids == (7, 8, 1)
    assert job.sampling.max_tokens == 1
    (tie,) = verdict.near_ties
    assert (tie.prompt, tie.position, tie.expected, tie.got) == (0, 1, 3, 4)
    assert tie.gap == pytest.approx(0.05)
    assert verdict.is_lossless


def test_a_gap_over_the_tolerance_fails() -> None:
    verdict = judge(
        [[7]],
        [completion([3])],
        [completion([4])],
        score=Scorer({3: -1.0, 4: -1.2}),
        tolerance=0.1,
    )
    assert not verdict.is_lossless
    assert verdict.failures[0].gap == pytest.approx(0.2)


def judge_far_from_the_engines_choice(**options: Any) -> Verdict:
    return judge(
        [[7]],
        [completion([3])],
        [completion([4])],
        score=Scorer({3: -2.0, 4: -2.01, 9: -0.5}),
        tolerance=0.1,
        **options,
    )


def test_a_token_far_from_the_engines_choice_fails_even_near_the_reference() -> None:
    verdict = judge_far_from_the_engines_choice()
    assert verdict.failures[0].gap == pytest.approx(1.51)


def test_the_engines_choice_does_not_count_where_a_schema_may_forbid_it() -> None:
    verdict = judge_far_from_the_engines_choice(constrained={0})
    assert verdict.near_ties[0].gap == pytest.approx(0.01)


def test_a_token_far_likelier_than_the_reference_fails_too() -> None:
    verdict = judge(
        [[7]],
        [completion([3])],
        [completion([4])],
        score=Scorer({3: -2.0, 4: -0.5}),
        tolerance=0.1,
    )
    assert verdict.failures[0].gap == pytest.approx(1.5)


def test_an_output_that_ends_early_fails_without_a_finite_gap() -> None:
    scorer = Scorer({})
    verdict = judge([[7]], [completion([3, 4])], [completion([3])], score=scorer, tolerance=100.0)
    assert verdict.failures[0].gap == float("inf")
    assert (verdict.failures[0].expected, verdict.failures[0].got) == (4, None)
    assert scorer.asked == []


def test_at_tolerance_zero_even_an_exact_tie_fails() -> None:
    verdict = judge(
        [[7]],
        [completion([3])],
        [completion([4])],
        score=Scorer({3: -1.0, 4: -1.0}),
        tolerance=0.0,
    )
    assert not verdict.is_lossless
