"""Known texts, and counts of the drafts for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specserve.core.types import Int32Array


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of a request: the prompt, then from ``num_prompt_tokens`` on the target's output."""

    name: str
    tokens: Int32Array
    num_prompt_tokens: int


@dataclass(slots=True)
class Tally:
    """Counts of steps and drafts.

    Attributes:
        steps: steps of the target.
        drafts: steps with a draft.
        drafted: draft tokens.
        accepted: accepted draft tokens.
    """

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    def as_row(self) -> dict[str, Any]:
        """Means, for a table."""
        return {
            "accepted_per_step": round(self.accepted / self.steps, 3),
            "drafts_per_step": round(self.drafts / self.steps, 3),
            "accepted_per_draft": round(self.accepted / max(self.drafts, 1), 3),
            "acceptance_rate": round(self.accepted / max(self.drafted, 1), 3),
            "steps": self.steps,
        }


def num_same(one: Sequence[int] | Int32Array, other: Sequence[int] | Int32Array) -> int:
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
