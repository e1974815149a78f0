"""The last steps of each request, for people who watch: what was drafted, and what became of it.

The decoding loop hands over its outcomes as they are; they are sorted by request only when someone
looks. What is shown travels from rank 0 to the replica as :class:`RecentRequest`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from hashlib import blake2b

import msgspec

from specserve.core.types import Outcome, RequestControls

MAX_OUTCOMES = 4096
"""Outcomes kept, of all requests together: some megabytes."""

MAX_REQUESTS = 8
MAX_STEPS = 48
"""What is shown at most: of so many requests, so many steps of each."""


class RecentStep(msgspec.Struct, frozen=True):
    """What one step brought a request.

    Attributes:
        source: who drafted; empty: nobody did.
        num_drafted: draft tokens that were verified.
        num_accepted: how many of them the target accepted.
        num_new: tokens that the step emitted: the accepted ones and the target's own.
        new: those tokens; empty where texts are not shown.
        refused: the draft tokens that were not accepted; empty where texts are not shown.
    """

    source: str
    num_drafted: int
    num_accepted: int
    num_new: int
    new: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()


class RecentRequest(msgspec.Struct, frozen=True):
    """One request's last steps, in their order.

    Attributes:
        request: a digest of its id, which the client may have chosen.
        steps: at most ``MAX_STEPS``.
    """

    request: str
    steps: tuple[RecentStep, ...]


class RecentSteps:
    """Keeps the last outcomes. Calls come from one thread.

    Args:
        max_outcomes: how many, of all requests together; 0: none.
        with_tokens: whether :meth:`requests` tells tokens, or lengths alone.
    """

    def __init__(self, max_outcomes: int = MAX_OUTCOMES, *, with_tokens: bool = False) -> None:
        self._max_outcomes = max_outcomes
        self._with_tokens = with_tokens
        self._steps: deque[list[Outcome]] = deque()
        self._num_outcomes = 0
        self._tenants: dict[str, str] = {}
        self._private: set[str] = set()

    def began(self, request_id: str, controls: RequestControls) -> None:
        """A request's first step: whose it is, and whether it may be remembered."""
        if not controls.learn:
            self._private.add(request_id)
        elif controls.tenant:
            self._tenants[request_id] = controls.tenant
            if len(self._tenants) > self._max_outcomes:  # then its steps are likely gone as well
                del self._tenants[next(iter(self._tenants))]

    def note(self, outcomes: list[Outcome]) -> None:
        """One step's outcomes, kept as they are; of the decoding loop, so it costs next to nothing.

        Those of requests that may not be remembered are left out.
        """
        if self._private:
            outcomes = [each for each in outcomes if each.request_id not in self._private]
        if outcomes:
            self._steps.append(outcomes)
            self._num_outcomes += len(outcomes)
        while self._num_outcomes > self._max_outcomes:
            self._num_outcomes -= len(self._steps.popleft())

    def forget(self, request_ids: Collection[str]) -> None:
        """These requests have finished; what was noted of them stays for a while."""
        self._private.difference_update(request_ids)

    def requests(self, tenant: str = "") -> tuple[RecentRequest, ...]:
        """The last requests of ``tenant``, newest first; without API keys all are of ``""``."""
        found: dict[str, list[Outcome]] = {}
        for outcomes in reversed(self._steps):
            for outcome in outcomes:
                of_request = found.get(outcome.request_id)
                if of_request is None:
                    is_shown = self._tenants.get(outcome.request_id, "") == tenant
                    if not is_shown or len(found) == MAX_REQUESTS:
                        continue
                    of_request = found[outcome.request_id] = []
                if len(of_request) < MAX_STEPS:
                    of_request.append(outcome)
        return tuple(
            RecentRequest(_digest(request_id), tuple(map(self._step, reversed(of_request))))
            for request_id, of_request in found.items()
        )

    def _step(self, outcome: Outcome) -> RecentStep:
        draft = outcome.draft
        drafted = () if draft is None else draft.tokens
        source = "" if draft is None else draft.source
        step = RecentStep(source, len(drafted), outcome.num_accepted, len(outcome.new_tokens))
        if not self._with_tokens:
            return step
        return msgspec.structs.replace(
            step, new=outcome.new_tokens, refused=drafted[outcome.num_accepted :]
        )


def _digest(request_id: str) -> str:
    return blake2b(request_id.encode(), digest_size=4).hexdigest()
