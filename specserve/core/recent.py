"""The last steps of each request for the page ``/speculation``: drafts and accepted tokens.

The decoding loop passes each step's arrays unchanged. They are sorted by request only when the page
asks for them. Rank 0 sends them to the replica as :class:`RecentRequest`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

import msgspec

from specserve.core.types import Int32Array, RequestControls

MAX_OUTCOMES = 4096
"""Most steps kept, counted per request, of all requests together: some megabytes."""

MAX_REQUESTS = 8
MAX_STEPS = 48
"""Most requests that the page shows, and most steps of each."""

Tokens = tuple[int, ...]
T = TypeVar("T", Tokens, str)


class RecentStep(msgspec.Struct, Generic[T], frozen=True):
    """One request's part of a step. Its texts are token ids, or strings for the page.

    Attributes:
        source: label of the draft; empty: none was verified.
        num_drafted: draft tokens that were verified.
        num_accepted: draft tokens that the target accepted.
        num_new: tokens that the step emitted: the accepted ones and the target's own.
        accepted: text of the accepted draft tokens. All texts are empty if they are not shown.
        own: text of the tokens that the target sampled.
        refused: text of the draft tokens that were not accepted.
    """

    source: str
    num_drafted: int
    num_accepted: int
    num_new: int
    accepted: T
    own: T
    refused: T


class RecentRequest(msgspec.Struct, Generic[T], frozen=True):
    """One request's last steps, in their order.

    ``request`` is a digest of the request's id, because the client may have chosen the id.
    """

    request: str
    steps: tuple[RecentStep[T], ...]


class Step(NamedTuple):
    """One step of n requests, as :class:`RecentSteps` keeps it.

    Attributes:
        request_ids: n ids.
        sources: labels of drafts.
        which: int32 ``[n]``, index of each draft's label; -1: none was verified.
        num_drafted: int32 ``[n]``, verified draft tokens.
        num_accepted: int32 ``[n]``.
        num_new: int32 ``[n]``, tokens that the step emitted; 0: the request was not decoded.
        new: the emitted tokens of n requests; None: texts are not shown.
        drafted: int32 ``[n, k]``, draft tokens; None: texts are not shown, or nothing was
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

    def of_row(self, row: int) -> RecentStep[Tokens]:
        """The step of one request."""
        source = self.sources[self.which[row]] if self.which[row] >= 0 else ""
        num_drafted, num_accepted = int(self.num_drafted[row]), int(self.num_accepted[row])
        new = tuple(self.new[row]) if self.new is not None else ()
        refused: tuple[int, ...] = ()
        if self.drafted is not None:
            refused = tuple(self.drafted[row, num_accepted:num_drafted].tolist())
        return RecentStep(
            source,
            num_drafted,
            num_accepted,
            int(self.num_new[row]),
            new[:num_accepted],
            new[num_accepted:],
            refused,
        )


class RecentSteps:
    """Keeps the last steps, at most ``max_outcomes`` counted per request. Not thread-safe."""

    def __init__(self, max_outcomes: int = MAX_OUTCOMES, *, with_tokens: bool = False) -> None:
        self.with_tokens = with_tokens
        self._max_outcomes = max_outcomes
        self._steps: deque[Step] = deque()
        self._num_outcomes = 0
        self._tenants: dict[str, str] = {}
        self._private: set[str] = set()

    def began(self, request_id: str, controls: RequestControls) -> None:
        """Notes a new request's tenant, and whether its steps may be kept."""
        if not controls.learn:
            self._private.add(request_id)
        elif controls.tenant:
            self._tenants[request_id] = controls.tenant
            if len(self._tenants) > self._max_outcomes:  # the oldest one's steps are likely gone
                del self._tenants[next(iter(self._tenants))]

    def note(self, step: Step) -> None:
        """Keeps one step unchanged; cheap, because the decoding loop calls it.

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
        """Marks requests as finished; their steps stay until newer ones replace them."""
        self._private.difference_update(request_ids)

    def requests(self, tenant: str = "") -> tuple[RecentRequest[Tokens], ...]:
        """The last requests of ``tenant``, newest first; without API keys the tenant is ``""``."""
        found: dict[str, list[RecentStep[Tokens]]] = {}
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
