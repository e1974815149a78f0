"""Ends a replica's speculation, and not its engine, after an unexpected error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

from specserve.core.metrics import SpeculationMetrics

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Speculation(Protocol):
    """An object whose methods a step calls, in one thread."""

    metrics: SpeculationMetrics


def contained(without: Callable[..., Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorates a method of a :class:`Speculation`, so that it never raises.

    Errors of a source are caught earlier, and it is asked again later. An error that arrives here
    may have left the policy's state incomplete. So from the first one on, nothing is called any
    more until the replica starts again.

    Args:
        without: the result of a replica without speculation, from the method's arguments.
    """

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        @wraps(method)
        def run(speculation: Speculation, *args: Any) -> T:
            if not speculation.metrics.has_failed:
                try:
                    return method(speculation, *args)
                except Exception as error:
                    reason = f"drafting ended: {type(error).__name__}, see the log"
                    speculation.metrics.fail(reason)
                    logger.exception("No drafts until this replica starts again; it serves on")
            result: T = without(*args)
            return result

        return run

    return decorate
