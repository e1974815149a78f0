"""The last steps of each request, for people who watch: what was drafted, and what became of it.

The decoding loop hands over each step's arrays as they are; they are sorted by request only when
someone looks. What is shown travels from rank 0 to the replica as :class:`RecentRequest`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from specserve.core.types import Int32Array, RequestControls

MAX_OUTCOMES = 4096
"""Requests' steps kept, of all requests together: some megabytes."""

MAX_REQUESTS = 8
MAX_STEPS = 48
"""What is shown at most: of so many requests, so many steps of each."""


class StepCounts(msgspec.Struct, frozen=True):
    """What one step brought a request, without texts.

    Attributes:
        source: who drafted; empty: nobody did.
        num_drafted: draft tokens that were verified.
        num_accepted: how many of them the target accepted.
        num_new: tokens that the step emitted: those and the target's own.
    """

    source: str
    num_drafted: int
    num_accepted: int
    num_new: int


class RecentStep(StepCounts, frozen=True):
    """The same with the tokens that were emitted, and the draft's that were not accepted.

    Both are empty where texts are not shown.
    """

    new: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()


class RecentRequest(msgspec.Struct, frozen=True):
    """One request's last steps, in their order.

    It is named by a digest of its id, which the client may have chosen.
    """

    request: str
    steps: tuple[RecentStep, ...]


class Step(NamedTuple):
    """One step of n requests, as :class:`RecentSteps` keeps it.

    Attributes:
        request_ids: n.
        sources: names of drafts.
        which: int32 ``[n]``, index of each draft's name; -1: none was verified.
        num_drafted: int32 ``[n]``, verified draft tokens.
        num_accepted: int32 ``[n]``.
        num_new: int32 ``[n]``, tokens that the step emitted; a request without any had no turn.
        new: n, those tokens; None where texts are not shown.
        drafted: int32 ``[n, k]``, draft tokens; None where texts are not shown, or nothing was
            drafted.
    """

    request_ids: Sequence[str]
    sources: Sequence[str]
    which: Int32Array
    num_drafted: Int32Array
    num_accepted: Int32Array
    num_new: Int32Array
    new: Sequence[Sequence[int]] | None = None
    drafted: Int32Array | None = None

    def of_row(self, row: int) -> RecentStep:
        """What the step brought one request."""
        source = self.sources[self.which[row]] if self.which[row] >= 0 else ""
        num_drafted, num_accepted = int(self.num_drafted[row]), int(self.num_accepted[row])
        new = tuple(self.new[row]) if self.new is not None else ()
        refused: tuple[int, ...] = ()
        if self.drafted is not None:
            refused = tuple(self.drafted[row, num_accepted:num_drafted].tolist())
        return RecentStep(source, num_drafted, num_accepted, int(self.num_new[row]), new, refused)


class RecentSteps:
    """Keeps the last steps, ``max_outcomes`` counted by request. Calls come from one thread."""

    def __init__(self, max_outcomes: int = MAX_OUTCOMES, *, with_tokens: bool = False) -> None:
        self.with_tokens = with_tokens
        self._max_outcomes = max_outcomes
        self._steps: deque[Step] = deque()
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

    def note(self, step: Step) -> None:
        """One step, kept as it is; of the decoding loop, so it costs next to nothing.

        Requests that may not be remembered are left out.
        """
        if self._private and not self._private.isdisjoint(step.request_ids):
            step = _without(step, self._private)
        if step.request_ids:
            self._steps.append(step)
            self._num_outcomes += len(step.request_ids)
        while self._num_outcomes > self._max_outcomes:
            self._num_outcomes -= len(self._steps.popleft().request_ids)

    def forget(self, request_ids: Collection[str]) -> None:
        """These requests have finished; what was noted of them stays for a while."""
        self._private.difference_update(request_ids)

    def requests(self, tenant: str = "") -> tuple[RecentRequest, ...]:
        """The last requests of ``tenant``, newest first; without API keys all are of ``""``."""
        found: dict[str, list[RecentStep]] = {}
        for step in reversed(self._steps):
            for row, request_id in enumerate(step.request_ids):
                if not step.num_new[row]:
                    continue
                of_request = found.get(request_id)
                if of_request is None:
                    is_shown = self._tenants.get(request_id, "") == tenant
                    if not is_shown or len(found) == MAX_REQUESTS:
                        continue
                    of_request = found[request_id] = []
                if len(of_request) < MAX_STEPS:
                    of_request.append(step.of_row(row))
        return tuple(
            RecentRequest(_digest(request_id), tuple(reversed(steps)))
            for request_id, steps in found.items()
        )


def _without(step: Step, private: Collection[str]) -> Step:
    rows = [row for row, each in enumerate(step.request_ids) if each not in private]
    return step._replace(
        request_ids=[step.request_ids[row] for row in rows],
        which=step.which[rows],
        num_drafted=step.num_drafted[rows],
        num_accepted=step.num_accepted[rows],
        num_new=step.num_new[rows],
        new=None if step.new is None else [step.new[row] for row in rows],
        drafted=None if step.drafted is None else step.drafted[rows],
    )


def _digest(request_id: str) -> str:
    return blake2b(request_id.encode(), digest_size=4).hexdigest()
