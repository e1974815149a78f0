"""A source that may fail: its errors are counted, and it rests for a while instead of raising."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from specserve.core.backoff import Backoff
from specserve.core.compile import kernel, kernel_array
from specserve.core.errors import shorten
from specserve.core.metrics import SpeculationMetrics
from specserve.core.types import DraftBatch, Drafts, Int32Array, Int64Array, RequestControls
from specserve.sources.base import Source

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
        kind: the source's kind, its name in metrics and in ``vllm_xargs.speculation``.
        source: the source.
        metrics: where calls and errors are counted.
        vocab_size: draft tokens are 0 .. ``vocab_size - 1``; a draft with others is dropped.
        num_labels: the source's labels.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        kind: str,
        source: Source,
        metrics: SpeculationMetrics,
        vocab_size: int,
        num_labels: int,
        clock: Callable[[], float],
    ) -> None:
        self.kind = kind
        self.source = source
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._num_labels = num_labels
        self._clock = clock
        self._up = True
        self._rest = Backoff(FIRST_REST_S, LONGEST_REST_S)
        self._checked(Drafts.empty(0, 1), np.zeros(0, np.int32))  # compiles the kernel

    @property
    def ready(self) -> bool:
        """Whether the source may be asked: it is up, or its rest is over."""
        return self._up or self._rest.is_due(self._clock())

    def open(self, slot: int, controls: RequestControls) -> None:
        """Passes a new request on, also while resting: the source has to know it later."""
        self.call(lambda: self.source.open(slot, controls))

    def propose(self, batch: DraftBatch, limits: Int32Array) -> Drafts | None:
        """The source's drafts, all well-formed and none beyond its limit; None where it failed."""
        began = self._clock()
        drafts = self.call(lambda: self._checked(self.source.propose(batch, limits), limits))
        if drafts is None:
            return None
        if limits.any():  # otherwise it only learned
            self._metrics.count_call(self.kind, self._clock() - began)
        if not self._up:
            self._up = True
            self._rest.reset()
            self._metrics.set_up(self.kind, True)
            logger.warning("draft source %s is up again", self.kind)
        return drafts

    def close(self, slots: Int64Array) -> None:
        """Passes finished requests on, also while resting: what the source holds must not leak."""
        self.call(lambda: self.source.close(slots))

    def call(self, ask: Callable[[], T]) -> T | None:
        """What a call to the source returns; None, and the source rests, where it raises."""
        try:
            return ask()
        except Exception as error:
            self._switch_off(error)
            return None

    def _checked(self, drafts: Drafts, limits: Int32Array) -> Drafts:
        """The drafts as kernels take them.

        Raises:
            ValueError: they are not a batch's drafts.
        """
        rows = len(limits)
        if not isinstance(drafts, Drafts) or any(len(each) != rows for each in drafts):
            raise ValueError(f"wanted {rows} drafts, got {shorten(drafts)}")
        checked = Drafts(
            kernel_array(drafts.tokens, np.int32),
            kernel_array(drafts.lengths, np.int32),
            kernel_array(drafts.confidence, np.float32),
            kernel_array(drafts.labels, np.uint8),
        )
        if checked.tokens.shape != checked.confidence.shape:
            shapes = checked.tokens.shape, checked.confidence.shape
            raise ValueError(f"tokens and confidence of one shape wanted, got {shapes}")
        num_malformed = _drop_malformed(*checked, limits, self._vocab_size, self._num_labels)
        for _ in range(num_malformed):
            self._metrics.count_error(self.kind)
        return checked

    def _switch_off(self, error: Exception) -> None:
        self._metrics.count_error(self.kind)
        self._rest.fail(self._clock())
        reason = f"{type(error).__name__}: {shorten(str(error), 200)}"
        self._metrics.set_up(self.kind, False, reason)
        if self._up:
            self._up = False
            logger.warning("draft source %s is switched off: %s", self.kind, reason, exc_info=error)


@kernel
def _drop_malformed(tokens, lengths, confidence, labels, limits, vocab_size, num_labels):  # type: ignore[no-untyped-def]
    """Cuts drafts to their limits, and drops those that hold anything but tokens and confidence.

    A wrong token would be looked up in the target's embedding, out of its bounds.

    Returns:
        How many were dropped.
    """
    num_malformed = 0
    for row in range(limits.shape[0]):
        length = min(lengths[row], limits[row])
        is_good = 0 <= lengths[row] <= tokens.shape[1] and labels[row] < num_labels
        if is_good:
            for j in range(length):
                is_token = 0 <= tokens[row, j] < vocab_size
                is_good = is_good and is_token and 0.0 <= confidence[row, j] <= 1.0
        if not is_good and limits[row] > 0:
            num_malformed += 1
        lengths[row] = max(length, 0) if is_good else 0
    return num_malformed
