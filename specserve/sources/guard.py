"""A source that may fail: its errors are counted, and it rests for a while instead of raising."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from specserve.core.errors import shorten
from specserve.core.metrics import SpeculationMetrics
from specserve.core.types import Draft, DraftBatch
from specserve.sources.base import Proposer, Reader

logger = logging.getLogger(__name__)

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0


class GuardedSource:
    """Wraps a proposer so that nothing it does can fail a request.

    After an error the source is switched off: for ``FIRST_REST_S``, twice as long after each
    further error, at most ``LONGEST_REST_S``. The first call after that is the probe; a batch that
    it answers switches the source on again and the next rest is short again.

    Args:
        kind: the source's kind, its name in metrics and in ``vllm_xargs.speculation``.
        proposer: the source.
        metrics: where calls and errors are counted.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        kind: str,
        proposer: Proposer,
        metrics: SpeculationMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.kind = kind
        self._proposer = proposer
        self._metrics = metrics
        self._clock = clock
        self._up = True
        self._rest_s = FIRST_REST_S
        self._resume_at = 0.0

    @property
    def ready(self) -> bool:
        """Whether the source may be asked: it is up, or its rest is over."""
        return self._up or self._clock() >= self._resume_at

    def propose(self, batch: DraftBatch) -> list[Draft] | None:
        """The source's drafts, one a request; None where it failed."""
        began = self._clock()
        try:
            drafts = self._proposer.propose(batch)
            if len(drafts) != len(batch) or not all(type(draft) is Draft for draft in drafts):
                raise ValueError(f"wanted {len(batch)} drafts, got {shorten(drafts)}")
        except Exception as error:
            self._switch_off(error)
            return None
        if batch.max_draft_tokens.any():  # otherwise it only learned
            self._metrics.count_call(self.kind, self._clock() - began)
        self._switch_on()
        return drafts

    def reading_s(self, batch: DraftBatch) -> Sequence[float]:
        """What a source that is a :class:`Reader` says; empty of others, and where it failed."""
        if not isinstance(self._proposer, Reader):
            return ()
        try:
            return self._proposer.reading_s(batch)
        except Exception as error:
            self._switch_off(error)
            return ()

    def forget(self, request_ids: list[str]) -> None:
        """Passes the ids on, also while resting: what the source holds must not leak."""
        try:
            self._proposer.forget(request_ids)
        except Exception as error:
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        self._metrics.count_error(self.kind)
        self._resume_at = self._clock() + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        reason = f"{type(error).__name__}: {shorten(str(error), 200)}"
        self._metrics.set_up(self.kind, False, reason)
        if self._up:
            self._up = False
            logger.warning("draft source %s is switched off: %s", self.kind, reason, exc_info=error)

    def _switch_on(self) -> None:
        if not self._up:
            self._up = True
            self._rest_s = FIRST_REST_S
            self._metrics.set_up(self.kind, True)
            logger.warning("draft source %s is up again", self.kind)


def is_well_formed(draft: Draft, vocab_size: int) -> bool:
    """Whether the draft, which has at least one token, holds nothing but tokens and chances.

    A wrong token would be looked up in the target's embedding, out of its bounds.
    """
    tokens, chances = draft.tokens, draft.chances
    return (
        type(tokens) is tuple
        and set(map(type, tokens)) == {int}
        and min(tokens) >= 0
        and max(tokens) < vocab_size
        and len(chances) in (0, len(tokens))
        and all(0 <= chance <= 1 for chance in chances)
    )
