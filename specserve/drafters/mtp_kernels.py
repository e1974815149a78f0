"""Drafts of the MTP module on one CPU core, in one compiled call.

:class:`~specserve.drafters.mtp_module.MtpModule` computes the same by torch, in some 90 operations
for each draft token. For a few texts, calling them takes several times as long as their arithmetic.
Here the weights stay in bfloat16, so that a draft token reads half as much memory. All sums are
float32. Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specserve.core.compile import direct, inner, kernel, vector
from specserve.core.source_config import MAX_DRAFT_TOKENS
from specserve.core.types import Float32Array, Int32Array, Int64Array, UInt16Array

MAX_ENTRIES = 64
"""Most new entries of a call, of all texts together."""

_NUM_TOGETHER = 4  # rows that share one reading of a weight
_SLOT, _START, _END, _FIRST = range(4)
"""Columns of a span: row of the cache, its new entries ``start .. end - 1``, the first entry that
they may attend to."""


class Weights(NamedTuple):
    """The module's weights. ``w`` is the hidden size, ``r`` the rotated dimensions of a key.

    uint16 arrays hold bfloat16, the others are float32.

    Attributes:
        embedding: uint16 ``[vocab_size, w]``.
        enorm: ``[w]``.
        hnorm: ``[w]``.
        join: uint16 ``[w, 2 w]``.
        input_norm: ``[w]``.
        kv_down: uint16 ``[latent + r, w]``.
        kv_norm: ``[latent]``.
        query: uint16 ``[heads (nope + r), w]``.
        key_up: uint16 ``[heads, nope, latent]``.
        value_up: uint16 ``[heads, value, latent]``.
        out: uint16 ``[w, heads value]``.
        mlp_norm: ``[w]``.
        gate: ``[experts, w]``.
        gate_bias: ``[experts]``.
        shared_gate_up: uint16 ``[2 shared, w]``.
        shared_down: uint16 ``[w, shared]``.
        gate_up: uint16 ``[experts, 2 inner, w]``.
        down: uint16 ``[experts, w, inner]``.
        norm: ``[w]``.
        head: uint16 ``[vocab_size, w]``.
        cos: ``[max_entries, r / 2]``.
        sin: ``[max_entries, r / 2]``.
    """

    embedding: UInt16Array
    enorm: Float32Array
    hnorm: Float32Array
    join: UInt16Array
    input_norm: Float32Array
    kv_down: UInt16Array
    kv_norm: Float32Array
    query: UInt16Array
    key_up: UInt16Array
    value_up: UInt16Array
    out: UInt16Array
    mlp_norm: Float32Array
    gate: Float32Array
    gate_bias: Float32Array
    shared_gate_up: UInt16Array
    shared_down: UInt16Array
    gate_up: UInt16Array
    down: UInt16Array
    norm: Float32Array
    head: UInt16Array
    cos: Float32Array
    sin: Float32Array


class Scales(NamedTuple):
    """Numbers of the configuration: ``rms_norm_eps``, the factor of attention's scores,
    ``routed_scaling_factor``, ``num_experts_per_tok``, ``norm_topk_prob``."""

    eps: float
    scores: float
    routed: float
    top_k: int
    is_normalized: bool


class Scratch(NamedTuple):
    """Intermediate results of up to ``MAX_ENTRIES`` rows, all float32 but the first."""

    places: Int64Array  # [rows, 3]: slot, position, first entry
    states: Float32Array  # [rows, w]
    both: Float32Array  # [rows, 2 w]
    x: Float32Array  # [rows, w]
    normed: Float32Array  # [rows, w]
    entries: Float32Array  # [rows, latent + r]
    queries: Float32Array  # [rows, heads (nope + r)]
    latent: Float32Array  # [heads, latent + r]: of one row
    scores: Float32Array  # [max_entries, heads]: of one row
    attended: Float32Array  # [heads, latent]: of one row
    values: Float32Array  # [rows, heads value]
    out: Float32Array  # [rows, w]
    chances: Float32Array  # [experts]: of one row
    inner: Float32Array  # [1, 2 inner]: of one expert, or of the shared one
    logits: Float32Array  # [rows, vocab_size]


class MtpKernels:
    """The module's weights with compiled code for its drafts.

    Args:
        weights: the module's.
        scales: the module's.
        cache: float32 ``[slots, max_entries, latent + r]``, shared with the module.
    """

    def __init__(self, weights: Weights, scales: Scales, cache: Float32Array) -> None:
        rows, width = MAX_ENTRIES, len(weights.norm)
        heads, _, latent = weights.key_up.shape
        widest = max(len(weights.shared_gate_up), weights.gate_up.shape[1])
        shapes = {
            "states": (rows, width),
            "both": (rows, 2 * width),
            "x": (rows, width),
            "normed": (rows, width),
            "entries": (rows, cache.shape[2]),
            "queries": (rows, len(weights.query)),
            "latent": (heads, cache.shape[2]),
            "scores": (cache.shape[1], heads),
            "attended": (heads, latent),
            "values": (rows, weights.out.shape[1]),
            "out": (rows, width),
            "chances": (len(weights.gate),),
            "inner": (1, widest),
            "logits": (rows, len(weights.head)),
        }
        scratch = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self._parts = weights, scales, Scratch(np.zeros((rows, 3), np.int64), **scratch), cache
        self._tokens = np.zeros((rows, MAX_DRAFT_TOKENS), np.int32)
        self._chances = np.zeros((rows, MAX_DRAFT_TOKENS), np.float32)
        none = np.zeros((0, 4), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32)
        states = np.zeros((0, width), np.float32)
        self._draft = direct(draft, *self._parts, *none, states, self._tokens, self._chances)

    def draft(
        self, spans: Int64Array, num_drafts: Int64Array, tokens: Int32Array, states: Float32Array
    ) -> tuple[Int32Array, Float32Array]:
        """Computes new entries, writes them into the cache, and drafts.

        Args:
            spans: int64 ``[n, 4]``: slot, start, end of the new entries, first entry to attend to.
            num_drafts: int64 ``[n]``, tokens to draft behind each span; falling.
            tokens: int32 ``[m]``, next tokens of the new entries of all spans; m is at most
                ``MAX_ENTRIES``.
            states: float32 ``[m, w]``, the target's hidden states.

        Returns:
            tokens int32 and their probabilities float32, ``[>= n, >= max(num_drafts)]``; valid until the
            next call.
        """
        self._draft(*self._parts, spans, num_drafts, tokens, states, self._tokens, self._chances)
        return self._tokens, self._chances


@inner
def _as_float32(bits):  # type: ignore[no-untyped-def]
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inner
def _exp(x):  # type: ignore[no-untyped-def]
    """``exp(x)`` for ``x <= 0`` to 7 digits; the loop of the caller becomes vector instructions.

    ``2^n (1 + r + ... + r^6 / 6!)`` with ``x = n ln 2 + r``; 2^n is made from its bits.
    """
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    sum_ = np.float32(1 / 720)
    sum_ = sum_ * r + np.float32(1 / 120)
    sum_ = sum_ * r + np.float32(1 / 24)
    sum_ = sum_ * r + np.float32(1 / 6)
    sum_ = sum_ * r + np.float32(0.5)
    sum_ = sum_ * r + np.float32(1.0)
    sum_ = sum_ * r + np.float32(1.0)
    return sum_ * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@vector
def _linear(weight, x, n, y):  # type: ignore[no-untyped-def]
    """``y[:n] = x[:n] weight^T``, for ``weight`` uint16 ``[out, in]`` with an even ``out``.

    Two outputs of four rows share what they read.
    """
    size = weight.shape[1]
    for o in range(0, weight.shape[0], 2):
        row = 0
        while row + 4 <= n:
            a = b = c = d = e = f = g = h = np.float32(0.0)
            for i in range(size):
                this, next = _as_float32(weight[o, i]), _as_float32(weight[o + 1, i])
                a, e = a + this * x[row, i], e + next * x[row, i]
                b, f = b + this * x[row + 1, i], f + next * x[row + 1, i]
                c, g = c + this * x[row + 2, i], g + next * x[row + 2, i]
                d, h = d + this * x[row + 3, i], h + next * x[row + 3, i]
            y[row, o], y[row + 1, o], y[row + 2, o], y[row + 3, o] = a, b, c, d
            y[row, o + 1], y[row + 1, o + 1], y[row + 2, o + 1], y[row + 3, o + 1] = e, f, g, h
            row += 4
        while row < n:
            a = b = np.float32(0.0)
            for i in range(size):
                a += _as_float32(weight[o, i]) * x[row, i]
                b += _as_float32(weight[o + 1, i]) * x[row, i]
            y[row, o], y[row, o + 1] = a, b
            row += 1


@vector
def _rms(x, weight, eps, y):  # type: ignore[no-untyped-def]
    """``y = weight x / rms(x)``, all float32 ``[w]``."""
    total = np.float32(0.0)
    for i in range(weight.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1.0 / np.sqrt(total / weight.shape[0] + eps))
    for i in range(weight.shape[0]):
        y[i] = weight[i] * (x[i] * factor)


@vector
def _rotate(x, cos, sin, y):  # type: ignore[no-untyped-def]
    """Rotary embedding, as :func:`specserve.drafters.latent_attention.rotate`."""
    half = cos.shape[0]
    for i in range(half):
        first, second = x[2 * i], x[2 * i + 1]
        y[i] = first * cos[i] - second * sin[i]
        y[half + i] = second * cos[i] + first * sin[i]


@vector
def _attend(queries, entries, scale, scores, out):  # type: ignore[no-untyped-def]
    """Attention of one row's heads over ``entries``, float32 ``[seen, latent + r]``.

    ``queries`` is ``[heads, latent + r]``, ``scores`` ``[>= seen, heads]`` is written, and ``out``
    is ``[heads, latent]``.
    """
    seen, heads = entries.shape[0], queries.shape[0]
    _score(entries, queries, heads, scores)
    for head in range(heads):
        highest, total = np.float32(-np.inf), np.float32(0.0)
        for t in range(seen):
            highest = max(highest, scores[t, head])
        for t in range(seen):
            scores[t, head] = _exp((scores[t, head] - highest) * scale)
            total += scores[t, head]
        for t in range(seen):
            scores[t, head] /= total
    out[:] = np.float32(0.0)
    t = 0
    while t + _NUM_TOGETHER <= seen:
        for head in range(heads):
            a, b = scores[t, head], scores[t + 1, head]
            c, d = scores[t + 2, head], scores[t + 3, head]
            for i in range(out.shape[1]):
                out[head, i] += (
                    a * entries[t, i]
                    + b * entries[t + 1, i]
                    + c * entries[t + 2, i]
                    + d * entries[t + 3, i]
                )
        t += _NUM_TOGETHER
    while t < seen:
        for head in range(heads):
            for i in range(out.shape[1]):
                out[head, i] += scores[t, head] * entries[t, i]
        t += 1


@vector
def _score(entries, queries, heads, scores):  # type: ignore[no-untyped-def]
    for t in range(entries.shape[0]):
        head = 0
        while head + _NUM_TOGETHER <= heads:
            a = b = c = d = np.float32(0.0)
            for i in range(entries.shape[1]):
                each = entries[t, i]
                a += each * queries[head, i]
                b += each * queries[head + 1, i]
                c += each * queries[head + 2, i]
                d += each * queries[head + 3, i]
            scores[t, head], scores[t, head + 1] = a, b
            scores[t, head + 2], scores[t, head + 3] = c, d
            head += _NUM_TOGETHER
        while head < heads:
            a = np.float32(0.0)
            for i in range(entries.shape[1]):
                a += entries[t, i] * queries[head, i]
            scores[t, head] = a
            head += 1


@vector
def _lift(query, key_up, y):  # type: ignore[no-untyped-def]
    """``y = query key_up``: a head's query ``[nope]`` in the latent space, ``[latent]``."""
    y[:] = np.float32(0.0)
    for d in range(key_up.shape[0]):
        factor = query[d]
        for i in range(key_up.shape[1]):
            each = _as_float32(key_up[d, i])
            y[i] += factor * each


@vector
def _add_expert(x, gate_up, down, weight, mixed, y):  # type: ignore[no-untyped-def]
    """Adds ``weight down(silu(gate(x)) up(x))`` to ``y``, both ``[w]``; ``x`` is ``[1, w]``."""
    _linear(gate_up, x, 1, mixed)
    size = down.shape[1]
    for i in range(size):
        gate = mixed[0, i]
        mixed[0, i] = gate / (np.float32(1.0) + np.exp(-gate)) * mixed[0, size + i]
    for o in range(down.shape[0]):
        total = np.float32(0.0)
        for i in range(size):
            each = _as_float32(down[o, i])
            total += each * mixed[0, i]
        y[o] += weight * total


@vector
def _gates(x, gate, chances):  # type: ignore[no-untyped-def]
    for each in range(gate.shape[0]):
        total = np.float32(0.0)
        for i in range(gate.shape[1]):
            total += gate[each, i] * x[i]
        chances[each] = np.float32(1.0) / (np.float32(1.0) + np.exp(-total))


@vector
def _most_likely(logits):  # type: ignore[no-untyped-def]
    """Index of the highest logit, and its probability; 0 if there are NaNs."""
    best, highest, total = 0, logits[0], np.float32(0.0)
    for i in range(1, logits.shape[0]):
        if logits[i] > highest:
            best, highest = i, logits[i]
    for i in range(logits.shape[0]):
        total += _exp(logits[i] - highest)
    return best, np.float32(1.0) / total if total >= 1.0 else np.float32(0.0)  # 0 for NaN


@inner
def _mix_experts(w, scales, s, row):  # type: ignore[no-untyped-def]
    """Adds the shared expert and the best routed ones to ``s.x[row]``, for ``s.normed[row]``."""
    x, y = s.normed[row : row + 1], s.x[row]
    _add_expert(x, w.shared_gate_up, w.shared_down, np.float32(1.0), s.inner, y)
    _gates(x[0], w.gate, s.chances)
    total = 1e-20
    for part in range(2):  # first the sum of the chosen chances, then the experts
        chosen = -1
        previous, previous_index = np.inf, -1
        for _ in range(scales.top_k):
            best = -np.inf
            for each in range(w.gate.shape[0]):
                score = s.chances[each] + w.gate_bias[each]
                is_later = score < previous or (score == previous and each > previous_index)
                if is_later and score > best:
                    best, chosen = score, each
            previous, previous_index = best, chosen
            chance = s.chances[chosen]
            if part == 0:
                total += chance
            else:
                weight = scales.routed * (chance / total if scales.is_normalized else chance)
                _add_expert(x, w.gate_up[chosen], w.down[chosen], np.float32(weight), s.inner, y)


@inner
def _enter(w, scales, s, cache, tokens, n):  # type: ignore[no-untyped-def]
    """Computes n entries from ``tokens``, ``s.states`` and ``s.places``, and writes them into the
    cache. Leaves the layer's input in ``s.x`` and, normed, in ``s.normed``."""
    width, latent = w.norm.shape[0], w.kv_norm.shape[0]
    for row in range(n):
        embedded = s.both[row, :width]
        if s.places[row, 1] == 0:  # trained so
            embedded[:] = np.float32(0.0)
        else:
            for i in range(width):
                embedded[i] = _as_float32(w.embedding[tokens[row], i])
            _rms(embedded, w.enorm, scales.eps, embedded)
        _rms(s.states[row], w.hnorm, scales.eps, s.both[row, width:])
    _linear(w.join, s.both, n, s.x)
    for row in range(n):
        _rms(s.x[row], w.input_norm, scales.eps, s.normed[row])
    _linear(w.kv_down, s.normed, n, s.entries)
    for row in range(n):
        position = s.places[row, 1]
        entry, new = cache[s.places[row, 0], position], s.entries[row]
        _rms(new[:latent], w.kv_norm, scales.eps, entry[:latent])
        _rotate(new[latent:], w.cos[position], w.sin[position], entry[latent:])


@inner
def _leave(w, scales, s, cache, n):  # type: ignore[no-untyped-def]
    """Computes the results of the first n entries into ``s.states``, and their logits."""
    heads, nope, latent = w.key_up.shape
    size, value = w.query.shape[0] // heads, w.value_up.shape[1]
    _linear(w.query, s.normed, n, s.queries)
    for row in range(n):
        slot, position, first = s.places[row, 0], s.places[row, 1], s.places[row, 2]
        entries = cache[slot, first : position + 1]
        for head in range(heads):
            query, lifted = s.queries[row, head * size : (head + 1) * size], s.latent[head]
            _lift(query[:nope], w.key_up[head], lifted[:latent])
            _rotate(query[nope:], w.cos[position], w.sin[position], lifted[latent:])
        _attend(s.latent, entries, np.float32(scales.scores), s.scores, s.attended)
        for head in range(heads):
            values = s.values[row : row + 1, head * value : (head + 1) * value]
            _linear(w.value_up[head], s.attended[head : head + 1], 1, values)
    _linear(w.out, s.values, n, s.out)
    for row in range(n):
        for i in range(w.norm.shape[0]):
            s.x[row, i] += s.out[row, i]
        _rms(s.x[row], w.mlp_norm, scales.eps, s.normed[row])
        _mix_experts(w, scales, s, row)
        _rms(s.x[row], w.norm, scales.eps, s.states[row])
    _linear(w.head, s.states, n, s.logits)


@kernel
def draft(  # type: ignore[no-untyped-def]
    w, scales, s, cache, spans, num_drafts, tokens, states, drafted, chances
):
    """See :meth:`MtpKernels.draft`; writes ``drafted`` and ``chances``, ``[n, k]``."""
    row = 0
    for span in range(spans.shape[0]):
        for position in range(spans[span, _START], spans[span, _END]):
            s.places[row, 0], s.places[row, 1] = spans[span, _SLOT], position
            s.places[row, 2] = spans[span, _FIRST]
            for i in range(states.shape[1]):
                s.states[row, i] = states[row, i]
            row += 1
    _enter(w, scales, s, cache, tokens, row)
    last, num_left = -1, 0
    for span in range(spans.shape[0]):  # the last entries of the spans that want a draft, in front
        if num_drafts[span] > 0:
            last += spans[span, _END] - spans[span, _START]
            for i in range(s.places.shape[1]):
                s.places[span, i] = s.places[last, i]
            for i in range(s.x.shape[1]):
                s.x[span, i], s.normed[span, i] = s.x[last, i], s.normed[last, i]
            num_left += 1
    step = 0
    while num_left:
        if step:
            for row in range(num_left):
                s.places[row, 1] += 1
            _enter(w, scales, s, cache, drafted[:, step - 1], num_left)
        _leave(w, scales, s, cache, num_left)
        for row in range(num_left):
            drafted[row, step], chances[row, step] = _most_likely(s.logits[row])
        step += 1
        left = 0
        while left < num_left and num_drafts[left] > step:
            left += 1
        num_left = left
