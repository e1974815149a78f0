"""Simulates a serving engine: seeded random acceptance, and step times by a formula."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specserve.core.metrics import SpeculationMetrics
from specserve.core.types import DraftBatch, Drafts, Int32Array, Int64Array, RequestControls
from specserve.policy.chain import Chain
from specserve.sources.base import Member
from tests.draft_batches import propose

_WRONG = 99


@dataclass(frozen=True)
class Cost:
    """Cost of a step; all terms in units of 10 ms."""

    base: float
    per_request: float
    any_draft: float
    per_token: float

    def seconds(self, num_requests: int, num_draft_tokens: int) -> float:
        drafts = self.any_draft * (num_draft_tokens > 0) + self.per_token * num_draft_tokens
        return 0.01 * (self.base + self.per_request * num_requests + drafts)


FLAT = Cost(1, 0, 0.02, 0.0005)
"""A GPU at small batches: memory-bound, so that draft tokens cost almost nothing."""
MODERATE = Cost(1, 0.05, 0.05, 0.05)
STEEP = Cost(1, 0.12, 0.2, 0.1)
"""A CPU: a draft token costs nearly what a request's own token costs."""

ALWAYS, OFTEN, NEVER = (0.85, 0.9), (0.4, 0.7), (0.0, 0.0)
"""Probability that the first draft token is accepted, and that each further one is."""


@dataclass(frozen=True)
class Workload:
    """Requests of ``request_tokens`` tokens, one after another on ``concurrency`` rows.

    Attributes:
        chances: request ``i`` accepts with ``chances[i % len(chances)]``.
        hit_rate: probability that a request gets a draft in a step.
        noise: relative deviation of measured times; one in a hundred is five times too long.
    """

    chances: tuple[tuple[float, float], ...]
    cost: Cost
    concurrency: int
    num_steps: int = 600
    request_tokens: int = 150
    draft_len: int = 8
    hit_rate: float = 0.6
    noise: float = 0.05
    seed: int = 0


class ChanceSource:
    """Drafts 1, 2, 3, ... and draws the number of right tokens with each draft."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.workload: Workload
        self.requests: list[int] = []
        self.right = np.zeros(256, np.int64)

    def open(self, slot: int, controls: RequestControls) -> None: ...
    def close(self, slots: Int64Array) -> None: ...

    def propose(self, batch: DraftBatch, limits: Int32Array, drafts: Drafts) -> None:
        drafts.tokens[batch.slots] = np.arange(1, drafts.tokens.shape[1] + 1)
        for row, slot in enumerate(batch.slots.tolist()):
            if self.rng.random() < self.workload.hit_rate:
                drafts.lengths[slot] = limits[row]
                drafts.confidence[slot] = self.rng.choice((0.3, 0.5, 0.7))
                chances = self.workload.chances
                first, further = chances[self.requests[row] % len(chances)]
                count = 0
                while count < limits[row] and self.rng.random() < (further if count else first):
                    count += 1
                self.right[slot] = count


class Policy:
    """The project's policy: a chain with one source."""

    def __init__(self, draft_len: int = 8, num_slots: int = 64) -> None:
        self.source = ChanceSource()
        self.chain = Chain(
            [Member("ngram", self.source, ("ngram",), draft_len)],
            SpeculationMetrics(("ngram",)),
            num_slots=num_slots,
            clock=lambda: 0.0,
        )

    def draft(self, batch: DraftBatch, num_new: Int32Array, num_verified: Int32Array) -> Int32Array:
        """Lengths of the sent drafts."""
        self.chain.observe(batch, num_new, num_verified)
        return np.array([len(each) for each in self.chain.step(batch)], np.int32)


class FixedLength(Policy):
    """The baseline: drafts of one fixed length."""

    def __init__(self, length: int, draft_len: int = 8) -> None:
        super().__init__(draft_len)
        self._length = length

    def draft(self, batch: DraftBatch, num_new: Int32Array, num_verified: Int32Array) -> Int32Array:
        limits = np.full(len(num_new), 8, np.int32)
        return np.minimum(propose(self.source, batch, limits).lengths, self._length)


def stall_once(chain: Chain, factor: float) -> None:
    """Lets the next step with drafts seem so many times as long."""
    observe = chain.cost.observe

    def stalled(num_requests: int, num_draft_tokens: int, seconds: float) -> None:
        if num_draft_tokens:
            chain.cost.observe, seconds = observe, factor * seconds  # type: ignore[method-assign]
        observe(num_requests, num_draft_tokens, seconds)

    chain.cost.observe = stalled  # type: ignore[method-assign]


def speedup(workload: Workload, policy: Policy) -> float:
    """Output tokens per second, divided by those without speculation."""
    clock = random.Random(workload.seed + 1)
    size, source, chain = workload.concurrency, policy.source, policy.chain
    source.rng, source.workload = random.Random(workload.seed), workload
    source.requests = list(range(size))
    left = [workload.request_tokens * (row + 1) // size for row in range(size)]
    slots = np.arange(size)
    for slot in slots.tolist():
        chain.open(slot, RequestControls())
    token_ids = np.zeros((size, 64), np.int32)
    num_tokens = np.full(size, 32, np.int32)
    num_new, num_verified = np.ones(size, np.int32), np.zeros(size, np.int32)
    batch = DraftBatch(slots, token_ids, num_tokens, np.full(size, 4, np.int32))
    num_started, total, seconds = size, 0, 0.0
    for _ in range(workload.num_steps):
        num_verified = policy.draft(batch, num_new, num_verified)
        step_s = workload.cost.seconds(size, int(num_verified.sum()))
        seconds += step_s
        stall = 5.0 if clock.random() < 0.01 else 1.0
        measured_s = step_s * stall * math.exp(clock.gauss(0, workload.noise))
        chain.cost.observe(size, int(num_verified.sum()), measured_s)
        for row in range(size):
            right = int(source.right[row])
            num_new[row] = min(right, num_verified[row]) + 1
            written: Sequence[int] = [*range(1, right + 1), _WRONG][: num_new[row]]
            token_ids[row, 32 - num_new[row] : 32] = written
            source.right[row] = 0
            left[row] -= int(num_new[row])
            total += int(num_new[row])
            if left[row] <= 0:
                chain.close(np.array([row]))
                chain.open(row, RequestControls())
                source.requests[row], left[row] = num_started, workload.request_tokens
                num_verified[row] = 0
                num_started += 1
    return total / seconds * workload.cost.seconds(size, 0) / size
