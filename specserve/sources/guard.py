"""A source that may fail: its errors are counted, and it rests for a while instead of raising."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from specserve.core.backoff import Backoff
from specserve.core.compile import direct, kernel, kernel_array
from specserve.core.errors import shorten
from specserve.core.metrics import SpeculationMetrics
from specserve.core.types import DraftBatch, Drafts, Int32Array, Int64Array, RequestControls
from specserve.sources.base import Member

logger = logging.getLogger(__name__)

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0

T = TypeVar("T")


class GuardedSource:
    """Wraps a source so that nothing it does can fail a request.

    After an error the source is switched off: for ``FIRST_REST_S``, twice as long after each
    further error, at most ``LONGEST_REST_S``. The first call after that is the probe; a batch that
    it answers switches the source on again and the next rest is short again.

    Args:
        member: the source.
        metrics: where calls and errors are counted.
        vocab_size: draft tokens are 0 .. ``vocab_size - 1``; a draft with others is dropped.
        clock: monotonic seconds.
        offers: its drafts by slot, written; with room for the longest.
        first_label: number of the source's first label among all, of which the offers tell.

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
        first_label: int = 0,
    ) -> None:
        self.member = member
        self.call_s = 0.0
        self._metrics = metrics
        self._bounds = vocab_size, len(member.labels), first_label
        self._clock = clock
        self._offers = offers
        self._up = True
        self._rest = Backoff(FIRST_REST_S, LONGEST_REST_S)
        self._checked = Drafts.empty(0, 1)
        none = np.zeros(0, np.int64), np.zeros(0, np.int32)
        self._take = direct(_take, offers, *none, self._checked, self._bounds)

    @property
    def ready(self) -> bool:
        """Whether the source may be asked: it is up, or its rest is over."""
        return self._up or self._rest.is_due(self._clock())

    def open(self, slot: int, controls: RequestControls) -> None:
        """Passes a new request on, also while resting: the source has to know it later."""
        self.call(lambda: self.member.source.open(slot, controls))

    def propose(self, batch: DraftBatch, limits: Int32Array) -> Drafts | None:
        """The source's drafts, all well-formed and none beyond its limit; None where it failed.

        They are in the offers, too.
        """
        began = self._clock()
        try:
            drafts = self.member.source.propose(batch, limits)
            if drafts is not self._checked or len(drafts.lengths) != len(limits):
                drafts = self._checked = _checked(drafts, len(limits))
            num_malformed, num_wanted = self._take(
                self._offers, batch.slots, limits, drafts, self._bounds
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
            self._rest.reset()
            self._metrics.set_up(self.member.kind, True)
            logger.warning("draft source %s is up again", self.member.kind)
        return drafts

    def close(self, slots: Int64Array) -> None:
        """Passes finished requests on, also while resting: what the source holds must not leak."""
        self.call(lambda: self.member.source.close(slots))

    def call(self, ask: Callable[[], T]) -> T | None:
        """What a call to the source returns; None, and the source rests, where it raises."""
        try:
            return ask()
        except Exception as error:
            self._switch_off(error)
            return None

    def _switch_off(self, error: Exception) -> None:
        self._metrics.count_error(self.member.kind)
        self._rest.fail(self._clock())
        reason = f"{type(error).__name__}: {shorten(str(error), 200)}"
        self._metrics.set_up(self.member.kind, False, reason)
        if self._up:
            self._up = False
            logger.warning(
                "draft source %s is switched off: %s", self.member.kind, reason, exc_info=error
            )


def _checked(drafts: Drafts, num_rows: int) -> Drafts:
    """The drafts as kernels take them.

    Raises:
        ValueError: they are not a batch's drafts.
    """
    if not isinstance(drafts, Drafts) or any(len(each) != num_rows for each in drafts):
        raise ValueError(f"wanted {num_rows} drafts, got {shorten(drafts)}")
    checked = Drafts(
        kernel_array(drafts.tokens, np.int32),
        kernel_array(drafts.lengths, np.int32),
        kernel_array(drafts.confidence, np.float32),
        kernel_array(drafts.labels, np.uint8),
    )
    of_tokens, of_rows, *others = (each.shape for each in checked)
    if len(of_tokens) != 2 or len(of_rows) != 1 or others != [of_tokens, of_rows]:
        raise ValueError(
            f"wanted shapes [n, k], [n], [n, k], [n], got {of_tokens, of_rows, *others}"
        )
    return checked


@kernel
def _take(offers, slots, limits, drafts, bounds):  # type: ignore[no-untyped-def]
    """Cuts drafts to their limits, drops what holds anything but tokens and confidence, copies.

    A wrong token would be looked up in the target's embedding, out of its bounds.

    Returns:
        (how many were dropped, how many limits were above 0).
    """
    tokens, lengths, confidence, labels = drafts
    vocab_size, num_labels, first_label = bounds
    num_malformed = num_wanted = 0
    for row in range(limits.shape[0]):
        slot, limit = slots[row], min(limits[row], offers.tokens.shape[1])
        length = max(min(lengths[row], limit), 0)
        is_good = 0 <= lengths[row] <= tokens.shape[1] and labels[row] < num_labels
        if is_good:
            for j in range(length):
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
