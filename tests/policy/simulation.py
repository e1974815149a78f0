"""A serving engine without the engine: acceptance by chance, time by formula, all seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specserve.core.types import Draft
from specserve.sources.gate import Gate


class DraftGate(Protocol):
    def trim(self, request_ids: Sequence[str], drafts: list[Draft]) -> list[Draft]: ...
    def observe_step(self, num_requests: int, num_draft_tokens: int, seconds: float) -> None: ...
    def forget(self, request_ids: list[str]) -> None: ...


class FixedLength:
    """The gate's competitor: always the same length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def trim(self, request_ids: Sequence[str], drafts: list[Draft]) -> list[Draft]:
        return [draft.cut(self._length) for draft in drafts]

    def observe_step(self, num_requests: int, num_draft_tokens: int, seconds: float) -> None: ...
    def forget(self, request_ids: list[str]) -> None: ...


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: all terms in units of 10 ms."""

    base: float
    per_request: float
    any_draft: float
    per_token: float

    def seconds(self, num_requests: int, num_draft_tokens: int) -> float:
        drafts = self.any_draft * (num_draft_tokens > 0) + self.per_token * num_draft_tokens
        return 0.01 * (self.base + self.per_request * num_requests + drafts)


FLAT = Cost(1, 0, 0.02, 0.0005)
"""A GPU at small batches: memory-bound, draft tokens ride along."""
MODERATE = Cost(1, 0.05, 0.05, 0.05)
STEEP = Cost(1, 0.12, 0.2, 0.1)
"""A CPU: a draft token costs nearly what a request's own token costs."""

ALWAYS, OFTEN, NEVER = (0.85, 0.9), (0.4, 0.7), (0.0, 0.0)
"""Chance of the first draft token, and of each further one."""


@dataclass(frozen=True)
class Workload:
    """Requests of some tokens each, one after the other on ``concurrency`` rows.

    Attributes:
        chances: request ``i`` accepts by ``chances[i % len(chances)]``.
        hit_rate: how often there is a draft to offer.
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


def speedup(workload: Workload, gate: DraftGate) -> float:
    """Output tokens a second, over those without speculation."""
    rng, clock = random.Random(workload.seed), random.Random(workload.seed + 1)
    rows = list(range(workload.concurrency))
    left = [workload.request_tokens * (row + 1) // len(rows) for row in rows]
    num_started, num_tokens, seconds = len(rows), 0, 0.0
    for _ in range(workload.num_steps):
        ids = [str(request) for request in rows]
        offers = [_offer(workload, rng) for _ in rows]
        drafts = gate.trim(ids, offers)
        num_draft_tokens = sum(len(draft.tokens) for draft in drafts)
        step_s = workload.cost.seconds(len(rows), num_draft_tokens)
        seconds += step_s
        stall = 5.0 if clock.random() < 0.01 else 1.0
        measured_s = step_s * stall * math.exp(clock.gauss(0, workload.noise))
        gate.observe_step(len(rows), num_draft_tokens, measured_s)
        for row, (offer, draft) in enumerate(zip(offers, drafts, strict=True)):
            num_right = _num_right(workload, rows[row], len(offer.tokens), rng)
            num_new = min(num_right, len(draft.tokens)) + 1
            if isinstance(gate, Gate):
                gate.acceptance.observe(ids[row], offer, (*offer.tokens[:num_right], -1)[:num_new])
            left[row] -= num_new
            num_tokens += num_new
        for row, tokens_left in enumerate(left):
            if tokens_left <= 0:
                gate.forget([ids[row]])
                rows[row], left[row] = num_started, workload.request_tokens
                num_started += 1
    plain = len(rows) / workload.cost.seconds(len(rows), 0)
    return num_tokens / seconds / plain


def _offer(workload: Workload, rng: random.Random) -> Draft:
    if rng.random() >= workload.hit_rate:
        return Draft((), "ngram")
    return Draft(tuple(range(workload.draft_len)), "ngram", rng.choice((2, 3, 4)))


def _num_right(workload: Workload, request: int, length: int, rng: random.Random) -> int:
    first, further = workload.chances[request % len(workload.chances)]
    count = 0
    while count < length and rng.random() < (further if count else first):
        count += 1
    return count
