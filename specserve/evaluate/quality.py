"""Scores answers against references, and decides whether a method keeps the quality of ``none``."""

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
"""Largest difference of ROUGE-1 from that of ``none``, in points, if a method's texts differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The quality of one method's answers.

    Attributes:
        scores: F-measure by metric, mean over the answers, in points from 0 to 100.
        exact: share of answers equal to their reference; surrounding whitespace is ignored.
        delta: the method's ROUGE-1 minus that of ``none``, in points.
        verdict: comparison with the reference method's texts; None for the reference method.
        keeps: texts equal the reference method's or those of ``none``, up to near ties, or
            ``delta`` is small.
    """

    scores: dict[str, float]
    exact: float
    delta: float
    verdict: Verdict | None
    keeps: bool


_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")


class _Words(Tokenizer):  # type: ignore[misc]
    """Words of any script; a Chinese character is a word. The library's tokenizer is ASCII only."""

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
    """Judges every method of a comparison, which has one pass per method and includes ``none``."""
    references = [prompt.reference for prompt in comparison.prompts]
    scores = {
        method: rouge([answer.text for answer in answers_of(comparison, method)], references)
        for method in comparison.passes
    }
    none_rouge1 = scores[Method(NONE)]["rouge1"]
    found = {}
    for method, score in scores.items():
        delta = score["rouge1"] - none_rouge1
        verdict = comparison.verdicts.get(method)
        # The reference method has no verdict. The one of `none` also compares these two methods.
        relevant = (
            verdict or comparison.verdicts.get(Method(NONE)),
            comparison.against_none.get(method),
        )
        keeps = abs(delta) <= MAX_DELTA or any(each and each.is_lossless for each in relevant)
        same = [
            answer.text.strip() == reference.strip()
            for answer, reference in zip(answers_of(comparison, method), references, strict=True)
        ]
        found[method] = Quality(
            scores=score, exact=statistics.fmean(same), delta=delta, verdict=verdict, keeps=keeps
        )
    return found


def answers_of(comparison: Comparison, method: Method) -> tuple[Completion, ...]:
    """The completions of a method's only pass."""
    (only,) = comparison.passes[method]
    return only.completions
