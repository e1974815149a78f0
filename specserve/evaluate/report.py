"""Formats an evaluation as a table, as text lines and as JSON fields."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from specserve.compare.comparison import Comparison
from specserve.compare.report import add_columns
from specserve.engine.methods import Method
from specserve.evaluate.quality import MAX_DELTA, METRICS, Quality, answers_of


def table(
    comparison: Comparison, found: Mapping[Method, Quality], reference: Method, title: str
) -> Table:
    """The table, one row per method.

    Columns: median milliseconds per answer, tokens per second, ROUGE in points, share of answers
    equal to their reference, share of texts equal to the reference method's.
    """
    rows = Table(title=title, padding=(0, 1, 0, 0))
    short = [name.replace("rouge", "R") for name in METRICS]
    add_columns(rows, ("ms", "tok/s", *short, "exact", f"= {reference}"))
    for method, quality in found.items():
        answers = answers_of(comparison, method)
        verdict = quality.verdict
        rows.add_row(
            str(method),
            f"{1000 * statistics.median(each.seconds for each in answers):.0f}",
            f"{comparison.passes[method][0].tokens_per_second:.1f}",
            *(f"{quality.scores[name]:.2f}" for name in METRICS),
            f"{quality.exact:.0%}",
            f"{verdict.num_identical / len(answers):.0%}" if verdict else "",
        )
    return rows


def differences(found: Mapping[Method, Quality], reference: Method) -> list[str]:
    """One line per method whose texts differ from the reference method's, with the first one."""
    lines = []
    for method, quality in found.items():
        verdict = quality.verdict
        if verdict is None or verdict.num_identical == verdict.num_compared:
            continue
        ties, failed = verdict.near_ties, verdict.failures
        first = min(failed or ties, key=lambda each: each.prompt)
        has_ended = first.expected is None or first.got is None
        apart = "one of them ends there" if has_ended else f"two tokens {first.gap:.3f} nats apart"
        lines.append(
            f"{method}: {len(ties) + len(failed)} of {verdict.num_compared} texts are not "
            f"those of {reference}, {len(ties)} part at a near tie; the first"
            f"{' other' if failed and ties else ''}, of question {first.prompt + 1}, at token "
            f"{first.position + 1}: {apart}"
        )
    return lines


def failures(found: Mapping[Method, Quality], threshold: float | None) -> list[str]:
    """One line for each method and reason why its quality is not kept."""
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


def with_quality(
    content: dict[str, Any],
    comparison: Comparison,
    found: Mapping[Method, Quality],
    reference: Method,
    lost: Sequence[str],
) -> dict[str, Any]:
    """Turns the JSON document of a comparison into that of an evaluation; changes ``content``."""
    del content["lossless"]
    content["reference_method"] = str(reference)
    content["references"] = [each.reference for each in comparison.prompts]
    content["quality_kept"], content["failures"] = not lost, list(lost)
    for method, quality in found.items():
        entry = content[str(method)]
        entry["same_texts"] = entry.pop("lossless")
        entry |= {
            "rouge": quality.scores,
            "rouge1_difference": quality.delta,
            "exact": quality.exact,
        }
    return content
