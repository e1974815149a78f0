"""What a drafter counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from specserve.core.metric_specs import DRAFTER_COMPUTE, DRAFTER_REFUSED, DRAFTER_ROWS, MetricSpec

Refused = Literal["malformed", "unauthorized", "unfit", "failed", "expired", "crowded"]
"""What is dropped: a message that is none, a connection with a wrong secret or without one, a row
with a token, a guess or a state that is not the model's, a row for which the model raised, a
request whose time was over, one of a client that has too much waiting."""


@dataclass(slots=True, kw_only=True)
class ServerCounters:
    """What has happened since the start; may be read from any thread.

    Attributes:
        num_requests: requests for drafts that arrived whole.
        num_rows: their rows.
        num_feed_calls: turns in which texts were only brought up to date.
        num_refused: what was dropped, by reason.
        compute_s: time in the model, in seconds.
    """

    num_requests: int = 0
    num_rows: int = 0
    num_feed_calls: int = 0
    num_refused: dict[Refused, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(Refused), 0)
    )
    compute_s: float = 0.0

    def totals(self) -> Iterator[tuple[MetricSpec, tuple[str, ...], float]]:
        """Of each exported series: metric, values of its labels behind the drafter's, and value."""
        yield DRAFTER_ROWS, (), self.num_rows
        yield DRAFTER_COMPUTE, (), self.compute_s
        for reason, number in self.num_refused.items():
            yield DRAFTER_REFUSED, (reason,), number
