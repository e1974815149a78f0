"""A drafter's counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from specserve.core.metric_specs import DRAFTER_COMPUTE, DRAFTER_REFUSED, DRAFTER_ROWS
from specserve.core.samples import Sample

Refused = Literal["malformed", "unauthorized", "unfit", "failed", "expired", "crowded"]
"""Why something is dropped. The first two concern a message and a connection without the right
secret, the next two a row: it does not fit the model, or the model raised. The last two concern a
request: its time budget is over, or its client has too much waiting."""


@dataclass(slots=True, kw_only=True)
class ServerCounters:
    """Totals since the start; may be read from any thread.

    Attributes:
        num_rows: rows of valid requests for drafts.
        num_refused: what was dropped, by reason.
        compute_s: duration of all model calls that succeeded, in seconds.
    """

    num_rows: int = 0
    num_refused: dict[Refused, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(Refused), 0)
    )
    compute_s: float = 0.0

    def samples(self, source: str, drafter: str) -> Iterator[Sample]:
        """All series, labelled with the drafter's kind and name."""
        own = source, drafter
        yield Sample(DRAFTER_ROWS, own, self.num_rows)
        yield Sample(DRAFTER_COMPUTE, own, self.compute_s)
        for reason, number in self.num_refused.items():
            yield Sample(DRAFTER_REFUSED, (*own, reason), number)
