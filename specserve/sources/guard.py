"""Contains the errors of a source: counts them and switches the source off for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from specserve.core.backoff import Backoff
from specserve.core.errors import shorten
from specserve.core.metrics import SpeculationMetrics
from specserve.core.types import DraftBatch, Drafts, Int32Array
from specserve.sources.base import Member

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0

T = TypeVar("T")


class GuardedSource:
    """Wraps a source so that its errors cannot fail a request.

    An error switches the source off for ``FIRST_BACKOFF_S``. Each further error doubles this
    back-off, up to ``MAX_BACKOFF_S``. The first call after it is a probe: if the source answers, it
    is switched on again and the back-off is reset.

    Args:
        member: the source.
        metrics: where calls and errors are counted.
        clock: monotonic seconds.
        offers: where the source writes its drafts, by slot.

    Attributes:
        member: the source.
        call_s: seconds of the last question of :meth:`propose`.
        learn_s: seconds in which the source only learned before that question.
    """

    def __init__(
        self,
        member: Member,
        metrics: SpeculationMetrics,
        clock: Callable[[], float],
        offers: Drafts,
    ) -> None:
        self.member = member
        self.call_s = self.learn_s = 0.0
        self._metrics, self._clock, self._offers = metrics, clock, offers
        self._up = True
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)

    @property
    def ready(self) -> bool:
        """Whether the source may be asked: it is on, or the back-off is over."""
        return self._up or self._backoff.is_due(self._clock())

    def propose(self, batch: DraftBatch, limits: Int32Array, *, learns_first: bool = False) -> bool:
        """Asks for drafts, which the source writes into the offers; false: it failed.

        Args:
            batch: see :meth:`specserve.sources.base.Source.propose`.
            limits: the same.
            learns_first: the source first learns the batch's new tokens in a call of its own, so
                that ``call_s`` is the time of the drafts alone.
        """
        began, lengths, source = self._clock(), self._offers.lengths, self.member.source
        lengths[batch.slots] = 0
        self.learn_s = 0.0
        try:
            if learns_first:
                source.propose(batch, np.zeros_like(limits), self._offers)
                self.learn_s = self._clock() - began
            source.propose(batch, limits, self._offers)
        except Exception as error:
            lengths[batch.slots] = 0
            self._switch_off(error)
            return False
        self.call_s = self._clock() - began - self.learn_s
        if np.count_nonzero(limits):  # otherwise it only learned
            self._metrics.count_call(self.member.kind, self.call_s)
        if not self._up:
            self._up = True
            self._backoff.reset()
            self._metrics.set_up(self.member.kind, True)
            logger.warning("draft source %s is up again", self.member.kind)
        return True

    def call(self, ask: Callable[..., T], *arguments: object) -> T | None:
        """Result of a call to the source; None, and the source is switched off, if it raises."""
        try:
            return ask(*arguments)
        except Exception as error:
            self._switch_off(error)
            return None

    def _switch_off(self, error: Exception) -> None:
        self._metrics.count_error(self.member.kind)
        self._backoff.fail(self._clock())
        reason = f"{type(error).__name__}: {shorten(str(error), 200)}"
        self._metrics.set_up(self.member.kind, False, reason)
        if self._up:
            self._up = False
            logger.warning(
                "draft source %s is switched off: %s", self.member.kind, reason, exc_info=error
            )
