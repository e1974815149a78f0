"""Drafts of the MTP module on one CPU core, in one compiled call.

:class:`~specserve.drafters.mtp_module.MtpModule` computes the same by torch, in some 90 operations
for each draft token. For a few texts, calling them takes several times as long as their arithmetic.
Here the weights stay in bfloat16, so that a draft token reads half as much memory. All sums are
float32. Imports no torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import numpy as np

from specserve.core.compile import direct, inner, kernel
from specserve.core.source_config import MAX_DRAFT_TOKENS
from specserve.core.types import Float32Array, Int32Array, Int64Array, UInt16Array
from specserve.core.vector_kernels import (
    add_expert,
    as_float32,
    attend,
    gates,
    lift,
    linear,
    most_likely,
    rms,
    rotate,
)

MAX_ENTRIES = 64
"""Most new entries of a call, of all texts together."""

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
            tokens int32 and their probabilities float32, ``[>= n, >= max(num_drafts)]``. The
            arrays are valid until the next call.
        """
        self._draft(*self._parts, spans, num_drafts, tokens, states, self._tokens, self._chances)
        return self._tokens, self._chances


def compile_draft() -> None:
    """Compiles the kernel into the cache on disk, so that no drafter compiles it."""
    vector, matrix = np.zeros(1, np.float32), np.zeros((1, 1), np.uint16)
    usual: dict[str, Any] = {
        name: matrix if kind == UInt16Array else vector
        for name, kind in get_type_hints(Weights).items()
    }
    tables = dict.fromkeys(("gate", "cos", "sin"), vector[None])
    stacks = dict.fromkeys(("key_up", "value_up", "gate_up", "down"), matrix[None])
    weights = Weights(**usual | tables | stacks)
    MtpKernels(weights, Scales(0.0, 1.0, 1.0, 1, True), np.zeros((1, 1, 1), np.float32))


@inner
def _mix_experts(w, scales, s, row):  # type: ignore[no-untyped-def]
    """Adds the shared expert and the best routed ones to ``s.x[row]``, for ``s.normed[row]``."""
    x, y = s.normed[row : row + 1], s.x[row]
    add_expert(x, w.shared_gate_up, w.shared_down, np.float32(1.0), s.inner, y)
    gates(x[0], w.gate, s.chances)
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
                add_expert(x, w.gate_up[chosen], w.down[chosen], np.float32(weight), s.inner, y)


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
                embedded[i] = as_float32(w.embedding[tokens[row], i])
            rms(embedded, w.enorm, scales.eps, embedded)
        rms(s.states[row], w.hnorm, scales.eps, s.both[row, width:])
    linear(w.join, s.both, n, s.x)
    for row in range(n):
        rms(s.x[row], w.input_norm, scales.eps, s.normed[row])
    linear(w.kv_down, s.normed, n, s.entries)
    for row in range(n):
        position = s.places[row, 1]
        entry, new = cache[s.places[row, 0], position], s.entries[row]
        rms(new[:latent], w.kv_norm, scales.eps, entry[:latent])
        rotate(new[latent:], w.cos[position], w.sin[position], entry[latent:])


@inner
def _leave(w, scales, s, cache, n):  # type: ignore[no-untyped-def]
    """Computes the results of the first n entries into ``s.states``, and their logits."""
    heads, nope, latent = w.key_up.shape
    size, value = w.query.shape[0] // heads, w.value_up.shape[1]
    linear(w.query, s.normed, n, s.queries)
    for row in range(n):
        slot, position, first = s.places[row, 0], s.places[row, 1], s.places[row, 2]
        entries = cache[slot, first : position + 1]
        for head in range(heads):
            query, lifted = s.queries[row, head * size : (head + 1) * size], s.latent[head]
            lift(query[:nope], w.key_up[head], lifted[:latent])
            rotate(query[nope:], w.cos[position], w.sin[position], lifted[latent:])
        attend(s.latent, entries, np.float32(scales.scores), s.scores, s.attended)
        for head in range(heads):
            values = s.values[row : row + 1, head * value : (head + 1) * value]
            linear(w.value_up[head], s.attended[head : head + 1], 1, values)
    linear(w.out, s.values, n, s.out)
    for row in range(n):
        for i in range(w.norm.shape[0]):
            s.x[row, i] += s.out[row, i]
        rms(s.x[row], w.mlp_norm, scales.eps, s.normed[row])
        _mix_experts(w, scales, s, row)
        rms(s.x[row], w.norm, scales.eps, s.states[row])
    linear(w.head, s.states, n, s.logits)


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
            drafted[row, step], chances[row, step] = most_likely(s.logits[row])
        step += 1
        left = 0
        while left < num_left and num_drafts[left] > step:
            left += 1
        num_left = left
