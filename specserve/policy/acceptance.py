"""Estimates the probability that draft tokens are accepted, by online logistic regression.

The weights have variances as in adPredictor (Graepel et al., Web-Scale Bayesian Click-Through Rate
Prediction, 2010). An extended Kalman filter without covariances updates them. It learns from sent
and unsent drafts alike, because it compares each with the target's text. This is right for sampled
text, too: verification accepts a token with the probability with which the target samples it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specserve.core.compile import inner, kernel
from specserve.core.types import Drafts, Float64Array, Int32Array, Int64Array

CONFIDENCE_BUCKETS = 12
"""Levels of confidence. They become narrower towards 1, where a small difference in confidence
allows many more draft tokens."""

TOKEN_BUCKETS = 2048
"""Number of weights for hashed tokens, and again for hashed pairs of tokens; a power of two."""

MIN_SURVIVAL = 0.01
"""A lower survival counts as 0: even on an idle GPU, verifying a draft token takes time."""

OF_SOURCE, OF_TOKEN, OF_REQUEST = (0.5, 0.03), (1.0, 0.1), (0.5, 0.1)
"""Initial and least variance of weights. A larger variance means larger updates. The least one
keeps every weight adaptable."""

_MAX_PROBABILITY = 0.98  # cap of one token's probability
_MIN_SLOPE = 0.01  # least derivative of the probability, in the filter
_PAIR_FACTOR = 7919  # hashes a pair of tokens

_STEPS, _NUM_STEPS = 32.0, 256.0
_PROBABILITIES = 1.0 / (1.0 + np.exp(-np.arange(-_NUM_STEPS, _NUM_STEPS + 1) / _STEPS))
"""Logistic function at log-odds from -8 to 8, 32 to the unit: ``exp`` would take twice as long."""

_MAX_STOPS = 8  # stop tokens of a request at which its drafts are cut; the others only cost time

_WEIGHT, _VARIANCE = 0, 1

_ALONE, _AGREES, _DISAGREES, _NUM_RELATIONS = range(4)
"""What other sources offer at a draft token's position: no token, the same one, others only."""

_RELATIONS = CONFIDENCE_BUCKETS
_POSITIONS = _RELATIONS + 2 * _NUM_RELATIONS
_NUM_POSITIONS = 5
"""Offsets of a source's weights, after those by confidence. Each relation has two weights: one for
first draft tokens, one for later ones. Positions 1 to 4 have own weights; later ones share one."""


class AcceptanceState(NamedTuple):
    """Weights and offered drafts: T tenants, S sources, R slots, drafts of at most k tokens.

    The last axis of weights holds log-odds and their variance.

    Attributes:
        of_source: float64 ``[T, S, weights, 2]``, by confidence, by relation, by position.
        of_token: float64 ``[T, 2 TOKEN_BUCKETS, 2]``, weights of the draft token, then of its pair
            with the token before it.
        of_request: float64 ``[R, S, 2]``, weights.
        last: int32 ``[R]``, the last token of each text.
        tenant: int64 ``[R]``, number of each request's tenant.
        offers: the sources' drafts, arrays ``[S, R, k]`` and ``[S, R]``.
        stops: int32 ``[R, 8]``, tokens that end each request, then -1.
        first_labels: int64 ``[S + 1]``, index of each source's first label among all labels.
        num_invalid: int64 ``[S]``, dropped drafts.
        vocab_size: tokens are 0 .. ``vocab_size - 1``.
    """

    of_source: Float64Array
    of_token: Float64Array
    of_request: Float64Array
    last: Int32Array
    tenant: Int64Array
    offers: Drafts
    stops: Int32Array
    first_labels: Int64Array
    num_invalid: Int64Array
    vocab_size: int


class Acceptance:
    """Estimates ``P(draft tokens 1 .. j are all accepted)``.

    The log-odds of a draft token are a sum of five weights: for its confidence, its relation to
    other sources' drafts, the token, its pair with the token before, and the request. The weights
    of confidence start at the log-odds of that confidence. Tenants share no weights.

    An offered draft stays until the request's next tokens are known.

    Args:
        num_labels: number of labels of each source.
        num_slots: most requests that are open at a time.
        max_draft_len: longest draft of any source.
        vocab_size: a draft with other tokens is dropped.

    Attributes:
        state: the kernels' arrays; :meth:`open` may replace it.
    """

    def __init__(
        self, num_labels: Sequence[int], num_slots: int, max_draft_len: int, vocab_size: int
    ) -> None:
        self._tenants, num_sources = {"": 0}, len(num_labels)
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
            Drafts.empty(num_sources, num_slots, max_draft_len),
            np.full((num_slots, _MAX_STOPS), -1, np.int32),
            np.cumsum([0, *num_labels]),
            np.zeros(num_sources, np.int64),
            vocab_size,
        )

    def offers(self, source: int) -> Drafts:
        """The arrays that a source writes its drafts into."""
        return Drafts._make(each[source] for each in self.state.offers)

    def open(self, slot: int, tenant: str, stops: Sequence[int] = ()) -> None:
        """Registers a new request of a tenant, which the tokens ``stops`` end."""
        number = self._tenants.setdefault(tenant, len(self._tenants))
        if number == len(self.state.of_source):
            of_source, of_token = self._new_tenant
            self.state = self.state._replace(
                of_source=np.concatenate([self.state.of_source, of_source]),
                of_token=np.concatenate([self.state.of_token, of_token]),
            )
        self.state.tenant[slot] = number
        self.state.of_request[slot] = 0.0, OF_REQUEST[0]
        self.state.offers.lengths[:, slot] = 0
        kept, self.state.stops[slot] = stops[:_MAX_STOPS], -1
        self.state.stops[slot, : len(kept)] = kept


def _weights(variance: float, *shape: int) -> Float64Array:
    """float64 ``[*shape, 2]``: weights of 0 with this variance."""
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
    """The relation of draft token ``j`` to what other sources offer at its position."""
    found = _ALONE
    for other in range(a.offers.lengths.shape[0]):
        if other != source and j < a.offers.lengths[other, slot]:
            if a.offers.tokens[other, slot, j] == a.offers.tokens[source, slot, j]:
                return _AGREES
            found = _DISAGREES
    return found


@inner
def _weight_indices(a, source, slot, j, before):  # type: ignore[no-untyped-def]
    """Indices of a draft token's weights after the token ``before``: two of its source, two of
    tokens."""
    token = a.offers.tokens[source, slot, j]
    return (
        _level(a.offers.confidence[source, slot, j]),
        _RELATIONS + 2 * _relation(a, source, slot, j) + min(j, 1),
        token & (TOKEN_BUCKETS - 1),
        TOKEN_BUCKETS + ((_PAIR_FACTOR * before + token) & (TOKEN_BUCKETS - 1)),
    )


@inner
def _total(a, source, slot, indices, column):  # type: ignore[no-untyped-def]
    """Log-odds that a draft token is accepted if all before it are, or the variance of these."""
    confidence, relation, token, pair = indices
    tenant = a.tenant[slot]
    return (
        a.of_request[slot, source, column]
        + a.of_source[tenant, source, confidence, column]
        + a.of_source[tenant, source, relation, column]
        + a.of_token[tenant, token, column]
        + a.of_token[tenant, pair, column]
    )


@inner
def _num_usable(a, source, slot):  # type: ignore[no-untyped-def]
    """Number of an offered draft's tokens before one that ends its request; -1: it is invalid.

    If all of a draft is accepted, the target samples the ending token in the same step. An invalid
    token would be read outside the target's embedding.
    """
    tokens, length = a.offers.tokens[source, slot], a.offers.lengths[source, slot]
    label = a.first_labels[source] + a.offers.labels[source, slot]
    if length and not (0 < length <= tokens.shape[0] and label < a.first_labels[source + 1]):
        return -1
    for j in range(length):
        for stop in a.stops[slot]:
            if stop < 0:
                break
            if stop == tokens[j]:
                return j
        is_token = 0 <= tokens[j] < a.vocab_size
        if not (is_token and 0.0 <= a.offers.confidence[source, slot, j] <= 1.0):
            return -1
    return length


@inner
def survival_of(a, slots, limits, survival, lengths):  # type: ignore[no-untyped-def]
    """Writes the probability that each offered draft token and all before it are accepted.

    Args:
        a: the state. Invalid drafts are dropped and counted.
        slots: int64 ``[n]``.
        limits: int32 ``[S, >= n]``, longest draft that each request can use.
        survival: float64 ``[S, >= n, k]``, written; it falls along a draft.
        lengths: int32 ``[S, >= n]``, written: draft lengths within the limits.
    """
    for source in range(a.offers.lengths.shape[0]):
        for slot in slots:
            length = _num_usable(a, source, slot)
            a.num_invalid[source] += length < 0
            a.offers.lengths[source, slot] = max(length, 0)
    for source in range(a.offers.lengths.shape[0]):
        for row, slot in enumerate(slots):
            length = min(a.offers.lengths[source, slot], limits[source, row])
            lengths[source, row] = length
            probability, before = 1.0, a.last[slot]
            for j in range(length):
                if probability > 0.0:
                    indices = _weight_indices(a, source, slot, j, before)
                    odds = _total(a, source, slot, indices, _WEIGHT)
                    probability *= min(_probability(odds), _MAX_PROBABILITY)
                    if probability < MIN_SURVIVAL:
                        probability = 0.0
                    before = a.offers.tokens[source, slot, j]
                survival[source, row, j] = probability


@inner
def learn(a, slots, token_ids, num_tokens, num_new):  # type: ignore[no-untyped-def]
    """Updates the weights with the offered drafts of requests that have new tokens.

    Args:
        a: the state. Drafts that were learned from are removed; the others stay.
        slots: int64 ``[n]``.
        token_ids: int32 ``[n, >= max(num_tokens)]``.
        num_tokens: int32 ``[n]``.
        num_new: int32 ``[n]``, new tokens of the last step, at the end of each text.

    Returns:
        Number of offered drafts that stay.
    """
    num_left = 0
    for row in range(slots.shape[0]):
        slot, end, new = slots[row], num_tokens[row], num_new[row]
        for source in range(a.offers.lengths.shape[0]):
            if new > 0:
                _learn_draft(a, source, slot, token_ids[row, :end], end - new)
            else:
                num_left += a.offers.lengths[source, slot] > 0
        if new > 0:
            a.offers.lengths[:, slot] = 0
            a.last[slot] = token_ids[row, end - 1]
    return num_left


@inner
def _learn_draft(a, source, slot, text, first):  # type: ignore[no-untyped-def]
    """Updates the weights with one draft, compared with a text from position ``first`` on."""
    of_source, of_token = a.of_source[a.tenant[slot], source], a.of_token[a.tenant[slot]]
    for j in range(min(a.offers.lengths[source, slot], text.shape[0] - first)):
        is_right = a.offers.tokens[source, slot, j] == text[first + j]
        of_position = of_source[_POSITIONS + min(j, _NUM_POSITIONS - 1)]
        gain, shrinkage = _gains(of_position[_WEIGHT], of_position[_VARIANCE], is_right)
        _update_weight(of_position, gain, shrinkage, OF_SOURCE[1])
        indices = _weight_indices(a, source, slot, j, text[first + j - 1])
        odds = _total(a, source, slot, indices, _WEIGHT)
        variance = _total(a, source, slot, indices, _VARIANCE)
        gain, shrinkage = _gains(odds, variance, is_right)
        _update_weight(a.of_request[slot, source], gain, shrinkage, OF_REQUEST[1])
        for i in range(2):
            _update_weight(of_source[indices[i]], gain, shrinkage, OF_SOURCE[1])
            _update_weight(of_token[indices[2 + i]], gain, shrinkage, OF_TOKEN[1])
        if not is_right:
            break


@inner
def _gains(odds, variance, is_right):  # type: ignore[no-untyped-def]
    """Change of each weight and relative loss of its variance, both per unit of its variance.

    At log-odds beyond the table, an outcome that agrees changes nothing. Else the weights of a long
    run of right drafts would grow without end, and hardly follow its end.
    """
    probability = _probability(odds)
    slope = max(probability * (1.0 - probability), _MIN_SLOPE)
    share = 1.0 / (1.0 + slope * variance)
    is_certain = abs(odds) >= _NUM_STEPS / _STEPS and is_right == (odds > 0.0)
    error = 0.0 if is_certain else is_right - probability
    return share * error, share * slope


@inner
def _update_weight(weight, gain, shrinkage, least):  # type: ignore[no-untyped-def]
    variance = weight[_VARIANCE]
    weight[_WEIGHT] += variance * gain
    weight[_VARIANCE] = max(variance * (1.0 - variance * shrinkage), least)


@kernel
def unseen_survival(a, source, slots, survival):  # type: ignore[no-untyped-def]
    """Writes the survival of drafts that are not asked for yet, by position and request.

    Args:
        a: the state.
        source: index of the source.
        slots: int64 ``[n]``.
        survival: float64 ``[>= n, k]``, written; see :func:`survival_of`.
    """
    for row in range(slots.shape[0]):
        slot = slots[row]
        weights = a.of_source[a.tenant[slot], source]
        own, probability = a.of_request[slot, source, _WEIGHT], 1.0
        for j in range(survival.shape[1]):
            odds = weights[_POSITIONS + min(j, _NUM_POSITIONS - 1), _WEIGHT] + own
            probability *= min(_probability(odds), _MAX_PROBABILITY)
            survival[row, j] = probability
