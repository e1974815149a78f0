import math

import pytest
from rich.console import Console

from specserve.compare.comparison import Comparison, Settings
from specserve.compare.lossless import Difference, Verdict
from specserve.compare.prompts import Prompt
from specserve.engine.generation import Completion, RunResult
from specserve.engine.methods import HF, Method
from specserve.evaluate.quality import judge_quality, rouge
from specserve.evaluate.report import differences, failures, table

NONE, THEIRS = Method("none"), Method(HF)
NGRAM = Method("vllm-suffix", "16")
"""The longest name of a method."""
REFERENCES = ["the cat sat on the mat", "the dog sat on the log"]


def answers(*texts: str) -> list[RunResult]:
    completions = tuple(
        Completion(
            text=text, token_ids=(7, 8), finish_reason="stop", seconds=0.5, token_seconds=(0.1, 0.5)
        )
        for text in texts
    )
    return [RunResult(completions=completions, seconds=2.0, drafts=())]


def verdict(gap: float | None = None) -> Verdict:
    """A verdict on two texts. The second one differs by ``gap``."""
    if gap is None:
        return Verdict(num_identical=2, near_ties=(), failures=(), tolerance=0.1)
    parted = (Difference(prompt=1, position=4, expected=1, got=2, gap=gap),)
    ties, failed = (parted, ()) if gap <= 0.1 else ((), parted)
    return Verdict(num_identical=1, near_ties=ties, failures=failed, tolerance=0.1)


def compared(
    passes: dict[Method, list[RunResult]],
    verdicts: dict[Method, Verdict] | None = None,
    against_none: dict[Method, Verdict] | None = None,
) -> Comparison:
    return Comparison(
        prompts=[Prompt("", (), reference=each) for each in REFERENCES],
        settings=Settings(max_tokens=8, tolerance=0.1),
        passes=passes,
        verdicts=verdicts or {},
        against_none=against_none or {},
    )


def beside_hf(others: list[RunResult], of_ngram: Verdict, of_none: Verdict) -> Comparison:
    same = answers(*REFERENCES)
    return compared({NONE: same, NGRAM: others, THEIRS: same}, {NONE: of_none, NGRAM: of_ngram})


def test_rouge_equals_values_computed_by_hand() -> None:
    # 4 of 6 words, and 2 of 5 pairs of neighbours.
    scores = rouge(["the cat lay upon the mat"], REFERENCES[:1])
    assert scores["rouge1"] == pytest.approx(100 * 4 / 6)
    assert scores["rouge2"] == pytest.approx(100 * 2 / 5)
    assert scores["rougeL"] == pytest.approx(100 * 4 / 6)
    assert rouge(REFERENCES, REFERENCES) == dict.fromkeys(scores, 100.0)


def test_words_of_every_script_count() -> None:
    assert rouge(["今天天气很好"], ["今天天气不好"])["rouge1"] == pytest.approx(100 * 5 / 6)
    assert rouge(["привет мир"], ["привет дом"])["rouge1"] == pytest.approx(50)


def test_equal_texts_keep_the_quality() -> None:
    found = judge_quality(beside_hf(answers(*REFERENCES), verdict(), verdict()))
    assert [(each.delta, each.keeps) for each in found.values()] == [(0.0, True)] * 3
    assert found[THEIRS].verdict is None
    assert failures(found, None) == []
    assert failures(found, 100.0) == []


@pytest.mark.parametrize(("gap", "keeps"), [(0.05, True), (0.3, False)])
def test_a_worse_text_is_allowed_only_after_a_near_tie(gap: float, keeps: bool) -> None:
    worse = answers(REFERENCES[0], "something else entirely")
    found = judge_quality(beside_hf(worse, verdict(gap), verdict()))
    assert found[NGRAM].delta == pytest.approx(-50)
    assert [found[each].keeps for each in (NONE, NGRAM, THEIRS)] == [True, keeps, True]
    assert len(failures(found, None)) == (0 if keeps else 1)
    (line,) = differences(found, THEIRS)
    assert f"question 2, at token 5: two tokens {gap:.3f} nats apart" in line


@pytest.mark.parametrize(("gap", "keeps"), [(0.05, True), (0.3, False)])
def test_the_reference_is_judged_by_the_verdict_of_none(gap: float, keeps: bool) -> None:
    comparison = beside_hf(answers(*REFERENCES), verdict(), verdict(gap))
    comparison.passes[THEIRS] = answers(REFERENCES[0], "something else entirely")
    assert judge_quality(comparison)[THEIRS].keeps is keeps


def test_another_text_with_the_same_score_keeps_the_quality() -> None:
    turned = answers(REFERENCES[0], "on the log the dog sat")
    found = judge_quality(beside_hf(turned, verdict(0.3), verdict()))
    assert found[NGRAM].delta == 0
    assert found[NGRAM].keeps
    assert found[NGRAM].exact == 0.5


def test_a_single_method_is_judged_by_the_threshold_only() -> None:
    found = judge_quality(compared({NONE: answers("a", "b")}))
    assert failures(found, None) == []
    (line,) = failures(found, 15.0)
    assert line == "none: rouge1 0.00 is below --rouge1-threshold 15"


def test_a_text_that_ends_early_is_reported() -> None:
    ended = Difference(prompt=0, position=2, expected=None, got=5, gap=math.inf)
    parted = Verdict(num_identical=1, near_ties=(), failures=(ended,), tolerance=0.1)
    comparison = beside_hf(answers(*REFERENCES), parted, verdict())
    (line,) = differences(judge_quality(comparison), THEIRS)
    assert "of question 1, at token 3: one of them ends there" in line


def test_the_table_has_times_scores_and_equal_texts_within_80_columns() -> None:
    worse = answers(REFERENCES[0], "something else entirely")
    comparison = beside_hf(worse, verdict(0.05), verdict())
    found = judge_quality(comparison)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(comparison, found, THEIRS, "title"))
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in capture.get().splitlines()
        if line.startswith("│")
    ]
    worse_scores = ["50.00"] * 4
    assert rows[1] == ["vllm-suffix:16", "500", "2.0", *worse_scores, "50%", "50%"]
    assert rows[2] == ["hf", "500", "2.0", *["100.00"] * 4, "100%", ""]


@pytest.mark.parametrize(("gap", "keeps"), [(None, True), (0.05, True), (0.3, False)])
def test_quality_is_kept_where_the_texts_are_those_of_none_if_not_those_of_hugging_face(
    gap: float | None, keeps: bool
) -> None:
    same, far = answers(*REFERENCES), verdict(0.3)
    passes = {NONE: same, NGRAM: answers(REFERENCES[0], "else"), THEIRS: same}
    comparison = compared(passes, {NONE: far, NGRAM: far}, {NGRAM: verdict(gap)})
    assert judge_quality(comparison)[NGRAM].keeps == keeps
