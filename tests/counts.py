"""Counts one draft as the chain counts those of a step."""

from __future__ import annotations

import numpy as np

from specserve.core.metrics import SpeculationMetrics


def count_draft(
    metrics: SpeculationMetrics, label: str, num_drafted: int, num_accepted: int
) -> None:
    """One draft was verified."""
    which, drafted, accepted = np.array([[0], [num_drafted], [num_accepted]], np.int32)
    metrics.count_drafts((label,), which, drafted, accepted)
