"""Formats a comparison as a table and as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from specserve.compare.comparison import Comparison
from specserve.compare.lossless import Difference, Verdict
from specserve.compare.machine import circumstances
from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError
from specserve.core.metrics import AcceptanceSnapshot
from specserve.engine.generation import Completion, RunResult
from specserve.engine.methods import NONE, Method


def median_tokens_per_second(passes: Sequence[RunResult]) -> float:
    """Median throughput of the passes, in tokens per second."""
    return statistics.median(one.tokens_per_second for one in passes)


def median_first_token_seconds(passes: Sequence[RunResult]) -> float:
    """Median time to first token over all prompts of all passes, in seconds."""
    return statistics.median(c.first_token_seconds for one in passes for c in one.completions)


def totals(passes: Sequence[RunResult]) -> tuple[int, int, int]:
    """Sums over all sources and passes: (verified drafts, draft tokens, accepted tokens)."""
    entries = [entry for one in passes for entry in one.drafts]
    return (
        sum(entry.num_drafts for entry in entries),
        sum(entry.num_draft_tokens for entry in entries),
        sum(entry.num_accepted_tokens for entry in entries),
    )


def add_columns(rows: Table, numbers: Sequence[str]) -> None:
    """Adds the column of methods, the only one that a narrow terminal wraps, and of numbers."""
    rows.add_column("method", overflow="fold")
    for name in numbers:
        rows.add_column(name, justify="right", no_wrap=True)


def table(comparison: Comparison, title: str) -> Table:
    """The table, one row per method."""
    rows = Table(title=title)
    numbers = ("tok/s", f"x {NONE}", "first", "drafted", "accepted", "a draft", "same")
    add_columns(rows, numbers)
    base = next((p for m, p in comparison.passes.items() if m.is_none), None)
    for method, passes in comparison.passes.items():
        rate = median_tokens_per_second(passes)
        ratio = f"{rate / median_tokens_per_second(base):.2f}" if base else ""
        num_drafts, drafted, accepted = totals(passes)
        verdict = comparison.verdicts.get(method)
        num_same = verdict.num_compared - len(verdict.failures) if verdict else 0
        rows.add_row(
            str(method),
            f"{rate:.1f}",
            ratio,
            f"{median_first_token_seconds(passes) * 1000:.0f} ms",
            str(drafted) if drafted else "",
            f"{accepted / drafted:.0%}" if drafted else "",
            f"{accepted / num_drafts:.2f}" if num_drafts else "",
            f"{num_same}/{verdict.num_compared}" if verdict else "",
        )
    return rows


def explanation(comparison: Comparison) -> list[str]:
    """The results of the losslessness check, one line per method, and a hint after a failure."""
    lines = []
    for method, verdict in comparison.verdicts.items():
        words = [f"{verdict.num_identical} of {verdict.num_compared} texts identical"]
        for differences, name in ((verdict.near_ties, "near ties"), (verdict.failures, "CHANGED")):
            if differences:
                gap = max(d.gap for d in differences)
                words.append(f"{len(differences)} {name} (gap up to {gap:.3f} nats)")
        lines.append(f"{method}: {', '.join(words)}; tolerance {verdict.tolerance:g} nats")
    if any(each.failures and each.tolerance for each in comparison.verdicts.values()):
        lines.append("to tell rounding from a fault, run it with engine.dtype: float32")
    return lines


def document(comparison: Comparison, config: AppConfig, prompt_set: str) -> dict[str, Any]:
    """The whole comparison as a JSON object: one field per method, settings and environment."""
    return {
        **{str(method): _method(comparison, method) for method in comparison.passes},
        "lossless": comparison.is_lossless if comparison.verdicts else None,
        "prompts": {
            "set": prompt_set,
            "texts": [prompt.text for prompt in comparison.prompts],
            "num_tokens": [len(prompt.token_ids) for prompt in comparison.prompts],
        },
        "settings": asdict(comparison.settings),
        "config": config.model_dump(mode="json"),
        **circumstances(),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a document as JSON, atomically: to a temporary file, which is then renamed.

    A device, a pipe or a symbolic link stays what it is, and is written in place.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    in_place = path.is_symlink() or (path.exists() and not path.is_file())
    written = path if in_place else path.with_name(f".{path.name}.tmp")
    try:
        written.write_text(f"{text}\n", encoding="utf-8")
        if not in_place:
            written.replace(path)
    except OSError as error:
        allowed = f"a file that can be written ({error.strerror})"
        raise ConfigError("--save-output", str(path), allowed) from None


def _method(comparison: Comparison, method: Method) -> dict[str, Any]:
    passes = comparison.passes[method]
    verdict, own = comparison.verdicts.get(method), comparison.against_none.get(method)
    return {
        "tokens_per_second": median_tokens_per_second(passes),
        "first_token_seconds": median_first_token_seconds(passes),
        "passes": [
            {
                "seconds": one.seconds,
                "tokens_per_second": one.tokens_per_second,
                "sources": {entry.source: _source(entry) for entry in one.drafts},
                "prompts": [_completion(completion) for completion in one.completions],
            }
            for one in passes
        ],
        "lossless": _verdict(verdict, len(comparison.prompts)) if verdict else None,
        "against_none": _verdict(own, len(comparison.prompts)) if own else None,
    }


def _source(entry: AcceptanceSnapshot) -> dict[str, Any]:
    return {
        "drafts": entry.num_drafts,
        "drafted_tokens": entry.num_draft_tokens,
        "accepted_tokens": entry.num_accepted_tokens,
        "drafted_at_position": entry.drafted_at_position,
        "accepted_at_position": entry.accepted_at_position,
    }


def _completion(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seconds": completion.seconds,
        "tokens_per_second": completion.tokens_per_second,
        "first_token_seconds": completion.first_token_seconds,
        "drafted_tokens": completion.num_draft_tokens,
        "accepted_tokens": completion.num_accepted_tokens,
    }


def _verdict(verdict: Verdict, num_prompts: int) -> dict[str, Any]:
    return {
        "is_lossless": verdict.is_lossless,
        "tolerance": verdict.tolerance,
        "identical": verdict.num_identical,
        "near_ties": [_difference(d, num_prompts) for d in verdict.near_ties],
        "failures": [_difference(d, num_prompts) for d in verdict.failures],
    }


def _difference(difference: Difference, num_prompts: int) -> dict[str, Any]:
    number, prompt = divmod(difference.prompt, num_prompts)
    gap = difference.gap if math.isfinite(difference.gap) else None
    return {"pass": number, **asdict(difference), "prompt": prompt, "gap": gap}
