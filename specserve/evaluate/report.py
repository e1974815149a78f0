"""An evaluation as a table and lines for people, and as fields of a JSON document."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from specserve.compare.comparison import Comparison
from specserve.engine.methods import Method
from specserve.evaluate.quality import MAX_DELTA, METRICS, Quality, answers_of


def table(
    comparison: Comparison, found: Mapping[Method, Quality], reference: Method, title: str
) -> Table:
    """One row a method.

    Columns: median seconds an answer, tokens a second, ROUGE in points, ROUGE-1 less that of
    ``none``, share of texts equal to the reference method's.
    """
    rows = Table(title=title)
    short = [name.replace("rouge", "R") for name in METRICS]
    for name in ("method", "latency", "tok/s", *short, "- none", f"= {reference}"):
        rows.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for method, quality in found.items():
        answers = answers_of(comparison, method)
        verdict = quality.verdict
        rows.add_row(
            str(method),
            f"{statistics.median(each.seconds for each in answers):.3f} s",
            f"{comparison.passes[method][0].tokens_per_second:.1f}",
            *(f"{quality.scores[name]:.2f}" for name in METRICS),
            "" if method.is_none else f"{quality.delta:+.2f}",
            f"{verdict.num_identical / len(answers):.0%}" if verdict else "",
        )
    return rows


def differences(found: Mapping[Method, Quality], reference: Method) -> list[str]:
    """A line a method whose texts are not all the reference method's: the first that parts."""
    lines = []
    for method, quality in found.items():
        parted = [*quality.verdict.near_ties, *quality.verdict.failures] if quality.verdict else []
        if parted:
            first = min(parted, key=lambda each: each.prompt)
            lines.append(
                f"{method}: {len(parted)} texts part from those of {reference}, the first, of "
                f"question {first.prompt + 1}, at token {first.position + 1}: two tokens "
                f"{first.gap:.3f} nats apart"
            )
    return lines


def failures(found: Mapping[Method, Quality], threshold: float | None) -> list[str]:
    """A line for each method and reason why its quality is not kept."""
    lines = []
    for method, quality in found.items():
        rouge1 = quality.scores["rouge1"]
        if not quality.keeps:
            lines.append(
                f"{method}: its texts differ, and its rouge1 is {quality.delta:+.2f} points from "
                f"that of none; allowed: {MAX_DELTA}"
            )
        if threshold is not None and rouge1 < threshold:
            lines.append(f"{method}: rouge1 {rouge1:.2f} is below --rouge1-threshold {threshold:g}")
    return lines


def quality_fields(quality: Quality) -> dict[str, Any]:
    """What the JSON document of a comparison gets for a method."""
    return {"rouge": quality.scores, "rouge1_difference": quality.delta, "keeps": quality.keeps}
