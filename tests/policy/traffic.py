"""Simulated requests for tests of a chain of sources.

After each step the target's next tokens are 1, 2, 3, ...; all other draft tokens are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specserve.core.metrics import HealthSnapshot, SpeculationMetrics
from specserve.core.types import (
    BoolArray,
    DraftBatch,
    Drafts,
    Float64Array,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.policy.chain import Chain
from specserve.sources.base import Member
from tests.draft_batches import draft_batch

AUTO = RequestControls()
WRONG = 9

Guess = Callable[[int], Sequence[int]]
"""Maps a slot to draft tokens."""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeLocal:
    """A local source that drafts by ``guess`` and records its calls.

    Attributes:
        guess: draft tokens by slot, or an error to raise.
        seconds: time of a call that asks for a draft.
        asked: draft limits of each call, by slot.
        closed: closed slots.
    """

    def __init__(self, guess: Guess | Exception, clock: Clock, seconds: float = 0.0) -> None:
        self.guess, self.seconds = guess, seconds
        self.asked: list[dict[int, int]] = []
        self.closed: list[int] = []
        self._clock = clock

    def open(self, slot: int, controls: RequestControls) -> None: ...

    def close(self, slots: Int64Array) -> None:
        self.closed += slots.tolist()

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        self.asked.append(dict(zip(batch.slots.tolist(), limits.tolist(), strict=True)))
        if isinstance(self.guess, Exception):
            raise self.guess
        if limits.any():
            self._clock.now += self.seconds
        for slot, limit in self.asked[-1].items():
            guess = list(self.guess(slot))[:limit]
            drafts.tokens[slot, : len(guess)] = guess
            drafts.confidence[slot] = 0.6
            drafts.lengths[slot] = len(guess)

    @property
    def num_asked(self) -> int:
        """Number of calls that asked for a draft."""
        return sum(any(each.values()) for each in self.asked)


class FakeRemote(FakeLocal):
    """A remote source that drafts by ``guess``.

    Attributes:
        waits: reading time in seconds, by slot.
        is_watching: whether it must see each step.
        may_follow: result of :meth:`follow_next`.
        num_to_follow: number of calls of :meth:`follow_next`.
    """

    def __init__(self, guess: Guess | Exception, clock: Clock, seconds: float = 0.0) -> None:
        super().__init__(guess, clock, seconds)
        self.waits: dict[int, float] = {}
        self.is_watching = False
        self.may_follow = False
        self.num_to_follow = 0

    def reading_s(self, batch: DraftBatch) -> Float64Array:
        return np.array([self.waits.get(slot, 0.0) for slot in batch.slots.tolist()])

    def are_followed(self, slots: Int64Array) -> BoolArray:
        return np.full(len(slots), self.is_watching)

    def follow_next(self) -> bool:
        self.num_to_follow += 1
        return self.may_follow


class Traffic:
    """A chain with requests in some slots; a formula gives the time of each step.

    Attributes:
        chain: the chain.
        clock: clock of the chain and of all sources.
        drafts: last sent drafts, by slot.
        sent: number of draft tokens of each step.
    """

    def __init__(
        self,
        sources: Mapping[str, FakeLocal],
        clock: Clock,
        *,
        slots: Sequence[int] = (0,),
        dynamic: bool = True,
        token_s: float = 1e-4,
        controls: RequestControls = AUTO,
    ) -> None:
        self.metrics = SpeculationMetrics(tuple(sources))
        members = [
            Member(kind, source, (f"{kind}_1",), 8, dynamic) for kind, source in sources.items()
        ]
        self.chain = Chain(members, self.metrics, num_slots=16, vocab_size=100, clock=clock)
        self.clock, self.token_s, self.controls = clock, token_s, controls
        self.drafts: dict[int, list[int]] = {}
        self.sent: list[int] = []
        self.open(*slots)

    def open(self, *slots: int) -> None:
        """Opens requests in these slots."""
        for slot in slots:
            self.chain.open(slot, self.controls)
            self.drafts[slot] = []

    def close(self, *slots: int) -> None:
        """Closes the requests in these slots."""
        self.chain.close(np.array(slots, np.int64))
        for slot in slots:
            del self.drafts[slot]

    def batch(self, slots: Sequence[int], new: Sequence[Sequence[int]]) -> DraftBatch:
        """A step of these requests that wrote these tokens."""
        return draft_batch({slot: [7, 7, *each] for slot, each in zip(slots, new, strict=True)})

    def step(self, *slots: int) -> None:
        """Runs a step of these requests, by default of all."""
        here = slots or tuple(self.drafts)
        new = [self._written(self.drafts[slot]) for slot in here]
        verified = np.array([len(self.drafts[slot]) for slot in here], np.int32)
        seconds = 0.01 + self.token_s * int(verified.sum())
        self.clock.now += seconds
        self.chain.cost.observe(len(here), int(verified.sum()), seconds)
        batch = self.batch(here, new)
        self.chain.observe(batch, np.array([len(each) for each in new], np.int32), verified)
        drafts = self.chain.step(batch)
        self.drafts |= dict(zip(here, drafts, strict=True))
        self.sent.append(sum(map(len, drafts)))

    def run(self, num_steps: int) -> None:
        """Runs steps of all requests."""
        for _ in range(num_steps):
            self.step()

    def health(self, kind: str) -> HealthSnapshot:
        """Health of a source."""
        return next(each for each in self.metrics.snapshot().health if each.source == kind)

    def _written(self, draft: Sequence[int]) -> list[int]:
        num_right = 0
        while num_right < len(draft) and draft[num_right] == num_right + 1:
            num_right += 1
        return list(range(1, num_right + 2))
