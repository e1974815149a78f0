"""What a drafter counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from specserve.wire.messages import Reason


@dataclass(slots=True, kw_only=True)
class ServerCounters:
    """What has happened since the start; may be read from any thread.

    Attributes:
        num_requests: requests for drafts that arrived whole.
        num_rows: their rows.
        num_calls: calls of the model.
        num_feed_calls: turns in which texts were only brought up to date.
        num_drafts: drafts of at least one token.
        num_malformed: messages that were none.
        num_refused_connections: connections that came with a wrong secret, or without one.
        num_unfit_rows: rows with a token, a guess or a state that is not the model's; nothing is
            drafted for them.
        num_failed_rows: rows for which the model raised.
        num_refused: requests that got no answer, by reason.
        compute_s: time in the model, in seconds.
    """

    num_requests: int = 0
    num_rows: int = 0
    num_calls: int = 0
    num_feed_calls: int = 0
    num_drafts: int = 0
    num_malformed: int = 0
    num_refused_connections: int = 0
    num_unfit_rows: int = 0
    num_failed_rows: int = 0
    num_refused: dict[Reason, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(Reason), 0)
    )
    compute_s: float = 0.0
