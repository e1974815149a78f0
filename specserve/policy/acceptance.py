"""How likely each token of a draft is to be accepted, by what was accepted of its source before.

Counts by source, confidence and position in the draft, learned from every draft that was offered.
Whether it was sent makes no difference: the target's own text tells how far it was right. For
sampled text this is so with the right probability, too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from specserve.core.compile import inner, lean_kernel
from specserve.core.types import (
    Drafts,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    UInt8Array,
)

CONFIDENCE_BUCKETS = 12
"""Levels of confidence, in steps that become smaller towards 1: there a little more makes a draft
many tokens longer."""

POSITION_BUCKETS = 5
"""Positions 1, 2, 3 and 4, 5 to 8, and later ones."""

LEAST_SURVIVAL = 0.01
"""What is less likely counts as impossible: not even an idle GPU verifies for nothing."""

_MOST_LIKELY = 0.98
_PRIOR_TRIALS = 4.0
_MOST_TRIALS = 1024.0
_RATIO_PRIOR = 4.0
_RATIO_MEMORY = 0.97

_ACCEPTED, _EXPECTED = 0, 1
_ANY_LEVEL = CONFIDENCE_BUCKETS


class AcceptanceState(NamedTuple):
    """All arrays, for T tenants, S sources, R request slots and drafts of at most k tokens.

    Attributes:
        counts: float64 ``[T, S, confidence + 1, position, 2]``, draft tokens that were accepted,
            and that were tried; last of all levels of confidence together.
        ratios: float64 ``[T, S, 2, 2]``, recent tokens accepted and expected by the prior, of
            first draft tokens and of later ones.
        rates: float64 ``[T, confidence, position]``, scratch.
        of_request: float64 ``[R, S, 2]``, a request's recent tokens accepted and expected.
        tenant: int64 ``[R]``.
        tokens: int32 ``[S, R, k]``, the last step's drafts.
        lengths: int32 ``[S, R]``; 0: none was offered.
        confidence: float32 ``[S, R, k]``.
        labels: uint8 ``[S, R]``.
    """

    counts: Float64Array
    ratios: Float64Array
    rates: Float64Array
    of_request: Float64Array
    tenant: Int64Array
    tokens: Int32Array
    lengths: Int32Array
    confidence: Float32Array
    labels: UInt8Array


class Acceptance:
    """Estimates ``P(draft tokens 1 .. j are all accepted)``.

    A source's confidence is believed as far as it was right before: a token's rate is that of other
    tokens of about the same confidence at about the same position, with a prior that takes
    the confidence for true, scaled by the source's recent ratio of accepted to expected tokens.
    Each request multiplies the rates of a source by its own such ratio. Older
    observations count less. What is accepted of one tenant's drafts does not change another's.

    What is offered to a request stays until its next tokens are known.

    Args:
        num_sources: S.
        num_slots: requests that may be open at a time.
        max_draft_len: longest draft of any source.

    Attributes:
        state: for kernels; another one after :meth:`open`.
    """

    def __init__(self, num_sources: int, num_slots: int, max_draft_len: int) -> None:
        self._tenants = {"": 0}
        self.state = AcceptanceState(
            np.zeros((1, num_sources, CONFIDENCE_BUCKETS + 1, POSITION_BUCKETS, 2)),
            np.full((1, num_sources, 2, 2), _RATIO_PRIOR),
            np.zeros((1, CONFIDENCE_BUCKETS, POSITION_BUCKETS)),
            np.full((num_slots, num_sources, 2), _RATIO_PRIOR),
            np.zeros(num_slots, np.int64),
            np.zeros((num_sources, num_slots, max_draft_len), np.int32),
            np.zeros((num_sources, num_slots), np.int32),
            np.zeros((num_sources, num_slots, max_draft_len), np.float32),
            np.zeros((num_sources, num_slots), np.uint8),
        )

    def offers(self, source: int) -> Drafts:
        """A source's drafts by slot, to be written; labels count those of all sources."""
        state = self.state
        return Drafts(
            state.tokens[source],
            state.lengths[source],
            state.confidence[source],
            state.labels[source],
        )

    def open(self, slot: int, tenant: str) -> None:
        """A request begins: what is known of its tenant's traffic holds for it."""
        number = self._tenants.setdefault(tenant, len(self._tenants))
        if number == len(self.state.counts):
            self._add_tenants(number)
        self.state.tenant[slot] = number
        self.state.of_request[slot] = _RATIO_PRIOR
        self.state.lengths[:, slot] = 0

    def _add_tenants(self, count: int) -> None:
        state = self.state
        fills = {"counts": 0.0, "ratios": _RATIO_PRIOR, "rates": 0.0}
        larger = {}
        for name, fill in fills.items():
            old = getattr(state, name)
            larger[name] = np.concatenate([old, np.full((count, *old.shape[1:]), fill)])
        self.state = state._replace(**larger)


@inner
def _level(confidence):  # type: ignore[no-untyped-def]
    return min(int(CONFIDENCE_BUCKETS * confidence * confidence), CONFIDENCE_BUCKETS - 1)


@inner
def _place(position):  # type: ignore[no-untyped-def]
    if position < 2:
        return position
    if position < 4:
        return 2
    return 3 if position < 8 else 4


@inner
def _prior(level):  # type: ignore[no-untyped-def]
    return math.sqrt((level + 0.5) / CONFIDENCE_BUCKETS)


@inner
def _rate(a, tenant, source, level, place):  # type: ignore[no-untyped-def]
    """Share of draft tokens like these that are accepted, where all before them were."""
    ratio = a.ratios[tenant, source, min(place, 1)]
    prior = _prior(level) * ratio[_ACCEPTED] / ratio[_EXPECTED]
    seen = a.counts[tenant, source, level, place]
    return (seen[_ACCEPTED] + _PRIOR_TRIALS * prior) / (seen[_EXPECTED] + _PRIOR_TRIALS)


@inner
def _count(cell, is_accepted):  # type: ignore[no-untyped-def]
    """One more trial; past ``_MOST_TRIALS`` the older half is forgotten."""
    cell[_ACCEPTED] += is_accepted
    cell[_EXPECTED] += 1.0
    if cell[_EXPECTED] > _MOST_TRIALS:
        cell[_ACCEPTED] *= 0.5
        cell[_EXPECTED] *= 0.5


@inner
def _track(ratio, is_accepted, expected):  # type: ignore[no-untyped-def]
    """What is forgotten is filled up with the prior, which says: as expected."""
    rest = (1.0 - _RATIO_MEMORY) * _RATIO_PRIOR
    ratio[_ACCEPTED] = _RATIO_MEMORY * ratio[_ACCEPTED] + rest + is_accepted
    ratio[_EXPECTED] = _RATIO_MEMORY * ratio[_EXPECTED] + rest + expected


@inner
def survival_of(a, slots, limits, survival, lengths):  # type: ignore[no-untyped-def]
    """Probability that each offered draft token is accepted, all before it included.

    Args:
        a: the state.
        slots: int64 ``[n]``.
        limits: int32 ``[S, >= n]``, tokens of each draft that are of use.
        survival: float64 ``[S, >= n, k]``, written; falling along a draft.
        lengths: int32 ``[S, >= n]``, written: tokens of each draft.
    """
    for source in range(a.lengths.shape[0]):
        a.rates[:, 0, 0] = -1.0  # of this tenant none is computed yet
        for row in range(slots.shape[0]):
            slot = slots[row]
            length = min(a.lengths[source, slot], limits[source, row])
            lengths[source, row] = length
            if length <= 0:
                continue
            tenant = a.tenant[slot]
            if a.rates[tenant, 0, 0] < 0.0:
                for level in range(CONFIDENCE_BUCKETS):
                    for place in range(POSITION_BUCKETS):
                        a.rates[tenant, level, place] = _rate(a, tenant, source, level, place)
            own = a.of_request[slot, source]
            factor = own[_ACCEPTED] / own[_EXPECTED]
            probability = 1.0
            for j in range(length):
                if probability > 0.0:
                    level = _level(a.confidence[source, slot, j])
                    chance = factor * a.rates[tenant, level, _place(j)]
                    probability *= min(chance, _MOST_LIKELY)
                    if probability < LEAST_SURVIVAL:
                        probability = 0.0
                survival[source, row, j] = probability


@inner
def learn(a, slots, token_ids, num_tokens, num_new):  # type: ignore[no-untyped-def]
    """Learns how far the last offers were right.

    Args:
        a: the state.
        slots: int64 ``[n]``.
        token_ids: int32 ``[n, >= max(num_tokens)]``.
        num_tokens: int32 ``[n]``.
        num_new: int32 ``[n]``, tokens that the last step brought; the request's last ones. Offers
            to a request without new tokens stay.

    Returns:
        How many requests have offers left.
    """
    num_left = 0
    for source in range(a.lengths.shape[0]):
        for row in range(slots.shape[0]):
            slot = slots[row]
            if num_new[row] <= 0:
                num_left += a.lengths[source, slot] > 0
                continue
            known = min(a.lengths[source, slot], num_new[row])
            a.lengths[source, slot] = 0
            first = num_tokens[row] - num_new[row]
            tenant = a.tenant[slot]
            for j in range(known):
                right = a.tokens[source, slot, j] == token_ids[row, first + j]
                accepted = 1.0 if right else 0.0
                level = _level(a.confidence[source, slot, j])
                place = _place(j)
                expected = _rate(a, tenant, source, level, place)
                _track(a.of_request[slot, source], accepted, min(expected, _MOST_LIKELY))
                _track(a.ratios[tenant, source, min(j, 1)], accepted, _prior(level))
                _count(a.counts[tenant, source, level, place], accepted)
                _count(a.counts[tenant, source, _ANY_LEVEL, place], accepted)
                if not right:
                    break
    return num_left


@lean_kernel
def unseen_survival(a, source, slots, survival):  # type: ignore[no-untyped-def]
    """Survival of drafts that are not there yet, of which only the position is known.

    Args:
        a: the state.
        source: its index.
        slots: int64 ``[n]``.
        survival: float64 ``[>= n, k]``, written; see :func:`survival_of`.
    """
    for row in range(slots.shape[0]):
        slot = slots[row]
        own = a.of_request[slot, source]
        factor = own[_ACCEPTED] / own[_EXPECTED]
        probability, chance, last = 1.0, 0.0, -1
        for j in range(survival.shape[1]):
            if _place(j) != last:
                last = _place(j)
                # A level of its own: each of the others forgets by what is tried of it alone.
                seen = a.counts[a.tenant[slot], source, _ANY_LEVEL, last]
                chance = (seen[_ACCEPTED] + 0.5 * _PRIOR_TRIALS) / (seen[_EXPECTED] + _PRIOR_TRIALS)
            probability *= min(factor * chance, _MOST_LIKELY)
            survival[row, j] = probability
