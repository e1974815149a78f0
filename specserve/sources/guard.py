"""Contains the errors of a source: counts them and switches the source off for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from specserve.core.backoff import Backoff
from specserve.core.compile import direct, inner, kernel
from specserve.core.errors import shorten
from specserve.core.metrics import SpeculationMetrics
from specserve.core.types import DraftBatch, Drafts, Int32Array, Int64Array, RequestControls
from specserve.sources.base import LearningSource, Member

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
        vocab_size: draft tokens are 0 .. ``vocab_size - 1``; a draft with others is dropped.
        clock: monotonic seconds.
        offers: where the source's drafts are written, by slot; room for the longest draft.
        stops: int32 ``[num_slots, k]``, tokens that end each request, then -1. Drafts end before.
        first_label: index of the source's first label among the labels of all sources.

    Attributes:
        member: the source.
        call_s: seconds of the last call of :meth:`propose`.
    """

    def __init__(
        self,
        member: Member,
        metrics: SpeculationMetrics,
        vocab_size: int,
        clock: Callable[[], float],
        offers: Drafts,
        stops: Int32Array,
        first_label: int = 0,
    ) -> None:
        self.member = member
        self.call_s = 0.0
        self._metrics = metrics
        self._bounds = vocab_size, len(member.labels), first_label
        self._clock = clock
        self._offers = offers
        self._stops = stops
        self._up = True
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self._all_drafts = self._drafts = Drafts.empty(len(stops), member.max_draft_len)
        none = np.zeros(0, np.int64), np.zeros(0, np.int32)
        self._take = direct(_take, offers, stops, *none, self._drafts, self._bounds)

    @property
    def ready(self) -> bool:
        """Whether the source may be asked: it is on, or the back-off is over."""
        return self._up or self._backoff.is_due(self._clock())

    def open(self, slot: int, controls: RequestControls) -> None:
        """Passes on a new request, even while the source is off: it may draft for it later."""
        self.call(lambda: self.member.source.open(slot, controls))

    def propose(self, batch: DraftBatch, limits: Int32Array) -> Drafts | None:
        """The source's drafts, valid and within their limits; None: the source failed.

        Writes the drafts into ``offers`` too.
        """
        began = self._clock()
        if len(self._drafts.lengths) != len(limits):
            self._drafts = Drafts._make(each[: len(limits)] for each in self._all_drafts)
        drafts = self._drafts
        drafts.lengths[:] = 0
        try:
            self.member.source.propose(batch, limits, drafts)
            num_malformed, num_wanted = self._take(
                self._offers, self._stops, batch.slots, limits, drafts, self._bounds
            )
        except Exception as error:
            self._switch_off(error)
            return None
        self.call_s = self._clock() - began
        if num_wanted:  # otherwise it only learned
            self._metrics.count_call(self.member.kind, self.call_s)
        for _ in range(num_malformed):
            self._metrics.count_error(self.member.kind)
        if not self._up:
            self._up = True
            self._backoff.reset()
            self._metrics.set_up(self.member.kind, True)
            logger.warning("draft source %s is up again", self.member.kind)
        return drafts

    def close(self, slots: Int64Array) -> None:
        """Passes on finished requests, even while the source is off, to free their memory."""
        self.call(lambda: self.member.source.close(slots))

    def finish(self, batch: DraftBatch) -> None:
        """Shows a learning source the texts of requests that end."""
        source = self.member.source
        if isinstance(source, LearningSource) and self.ready:
            self.call(lambda: source.finish(batch))

    def call(self, ask: Callable[[], T]) -> T | None:
        """Result of a call to the source; None, and the source is switched off, if it raises."""
        try:
            return ask()
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


@inner
def _is_stop(stops, token):  # type: ignore[no-untyped-def]
    """Whether a token is among the first of ``stops``, which -1 ends."""
    for stop in stops:
        if stop < 0:
            return False
        if stop == token:
            return True
    return False


@kernel
def _take(offers, stops, slots, limits, drafts, bounds):  # type: ignore[no-untyped-def]
    """Cuts drafts to their limits, drops invalid ones and copies them into ``offers``.

    A draft ends before a token that ends its request: if all of it is accepted, the target samples
    this token in the same step. An invalid token would be read outside the target's embedding.

    Returns:
        (number of dropped drafts, number of limits above 0).
    """
    tokens, lengths, confidence, labels = drafts
    vocab_size, num_labels, first_label = bounds
    num_malformed = num_wanted = 0
    for row in range(limits.shape[0]):
        slot, limit = slots[row], limits[row]
        length = max(min(lengths[row], limit), 0)
        is_good = 0 <= lengths[row] <= tokens.shape[1] and labels[row] < num_labels
        if is_good:
            for j in range(length):
                if _is_stop(stops[slot], tokens[row, j]):
                    length = j
                    break
                is_token = 0 <= tokens[row, j] < vocab_size
                is_good = is_good and is_token and 0.0 <= confidence[row, j] <= 1.0
                offers.tokens[slot, j] = tokens[row, j]
                offers.confidence[slot, j] = confidence[row, j]
        if limit > 0:
            num_wanted += 1
            num_malformed += not is_good
        lengths[row] = offers.lengths[slot] = length if is_good else 0
        offers.labels[slot] = first_label + labels[row]
    return num_malformed, num_wanted
