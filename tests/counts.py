"""Counts one draft as the chain counts the drafts of a step."""

from __future__ import annotations

from specserve.core.metrics import SpeculationMetrics


def count_draft(
    metrics: SpeculationMetrics, label: str, num_drafted: int, num_accepted: int
) -> None:
    """Counts one verified draft."""
    if (counts := metrics._drafts.get(label)) is None:
        (counts,) = metrics.draft_counts((label,))
    counts[0, num_drafted] += 1
    counts[1, num_accepted] += 1
