"""How near answers come to their references, and whether a method keeps the quality of ``none``."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import Tokenizer

from specserve.compare.comparison import Comparison
from specserve.compare.lossless import Verdict
from specserve.engine.generation import Completion
from specserve.engine.methods import NONE, Method

METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")

MAX_DELTA = 0.5
"""How far the ROUGE-1 of a method whose texts differ may be from that of ``none``, in points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One method's answers.

    Attributes:
        scores: F-measure by metric, mean over the answers, in points from 0 to 100.
        exact: share of answers that are their reference, but for whitespace around it.
        delta: its ROUGE-1 less that of ``none``, in points.
        verdict: its texts beside those of the reference method; None: it is the reference.
        keeps: its texts are the reference method's up to near ties, or ``delta`` is small.
    """

    scores: dict[str, float]
    exact: float
    delta: float
    verdict: Verdict | None
    keeps: bool


_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")


class _Words(Tokenizer):  # type: ignore[misc]
    """Words of any script; the library's own are ASCII alone. A Chinese character is a word."""

    def tokenize(self, text: str) -> list[str]:
        return _WORDS.findall(text.lower())


def rouge(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE by Google's ``rouge-score``, without stemming, in points from 0 to 100.

    Source: Lin, ROUGE: A Package for Automatic Evaluation of Summaries (2004).
    """
    scorer = RougeScorer(METRICS, tokenizer=_Words())
    scores = [scorer.score(*pair) for pair in zip(references, answers, strict=True)]
    return {
        name: 100 * statistics.fmean(each[name].fmeasure for each in scores) for name in METRICS
    }


def judge_quality(comparison: Comparison) -> dict[Method, Quality]:
    """Every method of a comparison of one pass, ``none`` among them, beside known references."""
    references = [prompt.reference for prompt in comparison.prompts]
    scores = {
        method: rouge([answer.text for answer in answers_of(comparison, method)], references)
        for method in comparison.passes
    }
    of_none = scores[Method(NONE)]["rouge1"]
    found = {}
    for method, its in scores.items():
        delta = its["rouge1"] - of_none
        verdict = comparison.verdicts.get(method)
        # The reference method is as equal to `none` as `none` is to it.
        beside = verdict or comparison.verdicts.get(Method(NONE))
        keeps = abs(delta) <= MAX_DELTA or (beside is not None and beside.is_lossless)
        same = [
            answer.text.strip() == reference.strip()
            for answer, reference in zip(answers_of(comparison, method), references, strict=True)
        ]
        found[method] = Quality(
            scores=its, exact=statistics.fmean(same), delta=delta, verdict=verdict, keeps=keeps
        )
    return found


def answers_of(comparison: Comparison, method: Method) -> tuple[Completion, ...]:
    """The texts of a method's only pass."""
    (only,) = comparison.passes[method]
    return only.completions
