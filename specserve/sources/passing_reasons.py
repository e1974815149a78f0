"""Reasons why a source does not draft for some requests. Each is shown for some minutes,
and until the next request after them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from specserve.core.metrics import SpeculationMetrics

logger = logging.getLogger(__name__)

SHOWN_S = 600.0
"""Seconds for which a reason is shown after its last request."""


class PassingReasons:
    """Sets a source's ``reason``, and logs each reason when it is new.

    Args:
        metrics: where the newest reason is shown.
        kind: of the source.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        metrics: SpeculationMetrics,
        kind: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._kind, self._clock = metrics, kind, clock
        self._reasons: dict[str, tuple[float, str]] = {}

    def note(self, key: str, reason: str = "", error: Exception | None = None) -> None:
        """Records whether a request of this key gets drafts.

        Args:
            key: a key has one reason, which is logged if the key had none.
            reason: why there are no drafts; empty: there are, and the key's reason is dropped.
            error: its traceback is logged, too.
        """
        if not (reason or self._reasons):  # the usual case
            return
        now = self._clock()
        known = self._reasons.pop(key, None)
        self._reasons = {
            each: told for each, told in self._reasons.items() if told[0] > now - SHOWN_S
        }
        if reason:
            self._reasons[key] = now, reason
            if known is None:
                logger.warning("No drafts from the %s: %s", self._kind, reason, exc_info=error)
        shown = next((told[1] for told in reversed(self._reasons.values())), "")
        self._metrics.set_reachable(self._kind, True, shown)
