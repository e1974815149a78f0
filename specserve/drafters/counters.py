"""What a drafter counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from specserve.core.metric_specs import DRAFTER_COMPUTE, DRAFTER_REFUSED, DRAFTER_ROWS
from specserve.core.samples import Sample

Refused = Literal["malformed", "unauthorized", "unfit", "failed", "expired", "crowded"]
"""What is dropped: a message that is none, a connection with a wrong secret or without one, a row
with a token or a state that is not the model's, a row for which the model raised, a request whose
time was over, one of a client that has too much waiting."""


@dataclass(slots=True, kw_only=True)
class ServerCounters:
    """What has happened since the start; may be read from any thread.

    Attributes:
        num_requests: requests for drafts that arrived whole.
        num_rows: their rows.
        num_refused: what was dropped, by reason.
        compute_s: time in the model, in seconds.
    """

    num_requests: int = 0
    num_rows: int = 0
    num_refused: dict[Refused, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(Refused), 0)
    )
    compute_s: float = 0.0

    def samples(self, source: str, drafter: str) -> Iterator[Sample]:
        """All series, of a drafter of this kind and name."""
        own = source, drafter
        yield Sample(DRAFTER_ROWS, own, self.num_rows)
        yield Sample(DRAFTER_COMPUTE, own, self.compute_s)
        for reason, number in self.num_refused.items():
            yield Sample(DRAFTER_REFUSED, (*own, reason), number)
