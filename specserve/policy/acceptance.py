"""How likely each token of a draft is to be accepted, learned from what was accepted before.

Bayesian logistic regression, learned online from every draft that was offered, as in adPredictor
(Graepel et al., Web-Scale Bayesian Click-Through Rate Prediction, 2010), by an extended Kalman
filter without covariances. Whether the draft was sent makes no difference: the target's own text
tells how far it was right. For sampled text this is so with the right probability, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specserve.core.compile import inner, kernel
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

TOKEN_BUCKETS = 2048
"""Weights of tokens, and of pairs of them, a power of two: those of one hash share one."""

LEAST_SURVIVAL = 0.01
"""What is less likely counts as impossible: not even an idle GPU verifies for nothing."""

OF_SOURCE, OF_TOKEN, OF_REQUEST = (0.5, 0.03), (1.0, 0.1), (0.5, 0.1)
"""Variances of weights, at first and at least: the larger, the further one observation moves them.
None is believed for ever."""

_MOST_LIKELY = 0.98
_LEAST_SLOPE = 0.01
_PAIR_FACTOR = 7919

_STEPS, _NUM_STEPS = 32.0, 256.0
_PROBABILITIES = 1.0 / (1.0 + np.exp(-np.arange(-_NUM_STEPS, _NUM_STEPS + 1) / _STEPS))
"""By log-odds from -8 to 8, 32 to the unit: with ``exp`` a step's judgement takes twice as long."""

_WEIGHT, _VARIANCE = 0, 1

_ALONE, _AGREES, _DISAGREES, _NUM_RELATIONS = range(4)
"""What other sources offer in the place of a token: nothing, the same token, other ones."""

_RELATIONS = CONFIDENCE_BUCKETS
_POSITIONS = _RELATIONS + 2 * _NUM_RELATIONS
_NUM_POSITIONS = 5
"""Where a source's weights begin that stand behind those by confidence: by relation, of first draft
tokens and of later ones; by position alone, 1 to 4 or later."""


class AcceptanceState(NamedTuple):
    """All arrays, for T tenants, S sources, R request slots and drafts of at most k tokens.

    The last axis of weights holds log-odds and their variance.

    Attributes:
        of_source: float64 ``[T, S, weights, 2]``.
        of_token: float64 ``[T, 2 TOKEN_BUCKETS, 2]``, weights of the drafted token, then of it with
            the one before it.
        of_request: float64 ``[R, S, 2]``, weights.
        last: int32 ``[R]``, the last token of each text.
        tenant: int64 ``[R]``.
        tokens: int32 ``[S, R, k]``, the last step's drafts.
        lengths: int32 ``[S, R]``; 0: none was offered.
        confidence: float32 ``[S, R, k]``.
        labels: uint8 ``[S, R]``.
    """

    of_source: Float64Array
    of_token: Float64Array
    of_request: Float64Array
    last: Int32Array
    tenant: Int64Array
    tokens: Int32Array
    lengths: Int32Array
    confidence: Float32Array
    labels: UInt8Array


class Acceptance:
    """Estimates ``P(draft tokens 1 .. j are all accepted)``.

    The log-odds of a token are a sum of weights: of its source's confidence, which begin with what
    the source states; of what other sources offer in its place; of the token, alone and with the
    one before it; of its request. What is accepted of one tenant's drafts does not change what is
    expected of another's.

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
        of_source = _weights(OF_SOURCE[0], 1, num_sources, _POSITIONS + _NUM_POSITIONS)
        stated = np.sqrt((np.arange(CONFIDENCE_BUCKETS) + 0.5) / CONFIDENCE_BUCKETS)
        of_source[..., :_RELATIONS, _WEIGHT] = np.log(stated / (1.0 - stated))
        of_token = _weights(OF_TOKEN[0], 1, 2 * TOKEN_BUCKETS)
        self._new_tenant = of_source, of_token
        self.state = AcceptanceState(
            of_source.copy(),
            of_token.copy(),
            _weights(OF_REQUEST[0], num_slots, num_sources),
            np.zeros(num_slots, np.int32),
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
        if number == len(self.state.of_source):
            of_source, of_token = self._new_tenant
            self.state = self.state._replace(
                of_source=np.concatenate([self.state.of_source, of_source]),
                of_token=np.concatenate([self.state.of_token, of_token]),
            )
        self.state.tenant[slot] = number
        self.state.of_request[slot] = 0.0, OF_REQUEST[0]
        self.state.lengths[:, slot] = 0


def _weights(variance: float, *shape: int) -> Float64Array:
    """Weights of 0."""
    return np.stack([np.zeros(shape), np.full(shape, variance)], axis=-1)


@inner
def _level(confidence):  # type: ignore[no-untyped-def]
    return min(int(CONFIDENCE_BUCKETS * confidence * confidence), CONFIDENCE_BUCKETS - 1)


@inner
def _probability(odds):  # type: ignore[no-untyped-def]
    step = min(max(_STEPS * odds, -_NUM_STEPS), _NUM_STEPS)
    return _PROBABILITIES[int(step + _NUM_STEPS + 0.5)]


@inner
def _relation(a, source, slot, j):  # type: ignore[no-untyped-def]
    """What the other sources offer in the place of a draft token."""
    found = _ALONE
    for other in range(a.lengths.shape[0]):
        if other != source and j < a.lengths[other, slot]:
            if a.tokens[other, slot, j] == a.tokens[source, slot, j]:
                return _AGREES
            found = _DISAGREES
    return found


@inner
def _cells(a, source, slot, j, before):  # type: ignore[no-untyped-def]
    """Where a draft token's weights are, if it stands behind ``before``: two of its source, and two
    of tokens."""
    token = a.tokens[source, slot, j]
    return (
        _level(a.confidence[source, slot, j]),
        _RELATIONS + 2 * _relation(a, source, slot, j) + min(j, 1),
        token & (TOKEN_BUCKETS - 1),
        TOKEN_BUCKETS + ((_PAIR_FACTOR * before + token) & (TOKEN_BUCKETS - 1)),
    )


@inner
def _total(a, source, slot, cells, column):  # type: ignore[no-untyped-def]
    """Log-odds that a draft token is accepted where all before it were, or their variance."""
    confidence, relation, token, pair = cells
    tenant = a.tenant[slot]
    return (
        a.of_request[slot, source, column]
        + a.of_source[tenant, source, confidence, column]
        + a.of_source[tenant, source, relation, column]
        + a.of_token[tenant, token, column]
        + a.of_token[tenant, pair, column]
    )


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
        for row in range(slots.shape[0]):
            slot = slots[row]
            length = min(a.lengths[source, slot], limits[source, row])
            lengths[source, row] = length
            probability, before = 1.0, a.last[slot]
            for j in range(length):
                if probability > 0.0:
                    cells = _cells(a, source, slot, j, before)
                    odds = _total(a, source, slot, cells, _WEIGHT)
                    probability *= min(_probability(odds), _MOST_LIKELY)
                    if probability < LEAST_SURVIVAL:
                        probability = 0.0
                    before = a.tokens[source, slot, j]
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
    for row in range(slots.shape[0]):
        slot, end, new = slots[row], num_tokens[row], num_new[row]
        for source in range(a.lengths.shape[0]):
            if new > 0:
                _learn_draft(a, source, slot, token_ids[row, :end], end - new)
            else:
                num_left += a.lengths[source, slot] > 0
        if new > 0:
            a.lengths[:, slot] = 0
            a.last[slot] = token_ids[row, end - 1]
    return num_left


@inner
def _learn_draft(a, source, slot, text, first):  # type: ignore[no-untyped-def]
    """Learns from one draft, which was to stand behind the ``first`` tokens of a text."""
    of_source, of_token = a.of_source[a.tenant[slot], source], a.of_token[a.tenant[slot]]
    for j in range(min(a.lengths[source, slot], text.shape[0] - first)):
        is_right = a.tokens[source, slot, j] == text[first + j]
        of_position = of_source[_POSITIONS + min(j, _NUM_POSITIONS - 1)]
        moved, known = _innovation(of_position[_WEIGHT], of_position[_VARIANCE], is_right)
        _move(of_position, moved, known, OF_SOURCE[1])
        cells = _cells(a, source, slot, j, text[first + j - 1])
        odds = _total(a, source, slot, cells, _WEIGHT)
        variance = _total(a, source, slot, cells, _VARIANCE)
        moved, known = _innovation(odds, variance, is_right)
        _move(a.of_request[slot, source], moved, known, OF_REQUEST[1])
        for i in range(2):
            _move(of_source[cells[i]], moved, known, OF_SOURCE[1])
            _move(of_token[cells[2 + i]], moved, known, OF_TOKEN[1])
        if not is_right:
            break


@inner
def _innovation(odds, variance, is_right):  # type: ignore[no-untyped-def]
    """What an observation moves weights by, and makes known of them, per unit of their variance."""
    probability = _probability(odds)
    slope = max(probability * (1.0 - probability), _LEAST_SLOPE)
    share = 1.0 / (1.0 + slope * variance)
    return share * (is_right - probability), share * slope


@inner
def _move(weight, moved, known, least):  # type: ignore[no-untyped-def]
    variance = weight[_VARIANCE]
    weight[_WEIGHT] += variance * moved
    weight[_VARIANCE] = max(variance * (1.0 - variance * known), least)


@kernel
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
        weights = a.of_source[a.tenant[slot], source]
        own, probability = a.of_request[slot, source, _WEIGHT], 1.0
        for j in range(survival.shape[1]):
            odds = weights[_POSITIONS + min(j, _NUM_POSITIONS - 1), _WEIGHT] + own
            probability *= min(_probability(odds), _MOST_LIKELY)
            survival[row, j] = probability
