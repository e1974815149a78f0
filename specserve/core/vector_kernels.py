"""Float32 arithmetic of compiled kernels, for one CPU core.

Weights are uint16 arrays that hold bfloat16. Loops are written so that LLVM makes vector
instructions of them: several sums share what they read, because reading is what takes the time.
"""

from __future__ import annotations

import numpy as np

from specserve.core.compile import inner, vector

_NUM_TOGETHER = 4  # rows, heads or entries that share what they read


@inner
def as_float32(bits):  # type: ignore[no-untyped-def]
    """The number that these bits of a bfloat16 stand for."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inner
def exp(x):  # type: ignore[no-untyped-def]
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
def linear(weight, x, n, y):  # type: ignore[no-untyped-def]
    """``y[:n] = x[:n] weight^T``, for ``weight`` uint16 ``[out, in]`` with an even ``out``.

    Two outputs of four rows share what they read.
    """
    size = weight.shape[1]
    for o in range(0, weight.shape[0], 2):
        row = 0
        while row + 4 <= n:
            a = b = c = d = e = f = g = h = np.float32(0.0)
            for i in range(size):
                one, two = as_float32(weight[o, i]), as_float32(weight[o + 1, i])
                a, e = a + one * x[row, i], e + two * x[row, i]
                b, f = b + one * x[row + 1, i], f + two * x[row + 1, i]
                c, g = c + one * x[row + 2, i], g + two * x[row + 2, i]
                d, h = d + one * x[row + 3, i], h + two * x[row + 3, i]
            y[row, o], y[row + 1, o], y[row + 2, o], y[row + 3, o] = a, b, c, d
            y[row, o + 1], y[row + 1, o + 1], y[row + 2, o + 1], y[row + 3, o + 1] = e, f, g, h
            row += 4
        while row < n:
            a = b = np.float32(0.0)
            for i in range(size):
                a += as_float32(weight[o, i]) * x[row, i]
                b += as_float32(weight[o + 1, i]) * x[row, i]
            y[row, o], y[row, o + 1] = a, b
            row += 1


@vector
def rms(x, weight, eps, y):  # type: ignore[no-untyped-def]
    """``y = weight x / rms(x)``, all float32 ``[w]``."""
    total = np.float32(0.0)
    for i in range(weight.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1.0 / np.sqrt(total / weight.shape[0] + eps))
    for i in range(weight.shape[0]):
        y[i] = weight[i] * (x[i] * factor)


@vector
def rotate(x, cos, sin, y):  # type: ignore[no-untyped-def]
    """Rotary embedding, as :func:`specserve.drafters.ops.rotate`."""
    half = cos.shape[0]
    for i in range(half):
        first, second = x[2 * i], x[2 * i + 1]
        y[i] = first * cos[i] - second * sin[i]
        y[half + i] = second * cos[i] + first * sin[i]


@vector
def attend(queries, entries, scale, scores, out):  # type: ignore[no-untyped-def]
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
            scores[t, head] = exp((scores[t, head] - highest) * scale)
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
def lift(query, key_up, y):  # type: ignore[no-untyped-def]
    """``y = query key_up``: a head's query ``[nope]`` in the latent space, ``[latent]``."""
    y[:] = np.float32(0.0)
    for d in range(key_up.shape[0]):
        factor = query[d]
        for i in range(key_up.shape[1]):
            each = as_float32(key_up[d, i])
            y[i] += factor * each


@vector
def add_expert(x, gate_up, down, weight, mixed, y):  # type: ignore[no-untyped-def]
    """Adds ``weight down(silu(gate(x)) up(x))`` to ``y``, both ``[w]``; ``x`` is ``[1, w]``."""
    linear(gate_up, x, 1, mixed)
    size = down.shape[1]
    for i in range(size):
        gate = mixed[0, i]
        mixed[0, i] = gate / (np.float32(1.0) + np.exp(-gate)) * mixed[0, size + i]
    for o in range(down.shape[0]):
        total = np.float32(0.0)
        for i in range(size):
            each = as_float32(down[o, i])
            total += each * mixed[0, i]
        y[o] += weight * total


@vector
def gates(x, gate, chances):  # type: ignore[no-untyped-def]
    """``chances = sigmoid(gate x)``, for ``gate`` float32 ``[experts, w]``."""
    for each in range(gate.shape[0]):
        total = np.float32(0.0)
        for i in range(gate.shape[1]):
            total += gate[each, i] * x[i]
        chances[each] = np.float32(1.0) / (np.float32(1.0) + np.exp(-total))


@vector
def most_likely(logits):  # type: ignore[no-untyped-def]
    """Index of the highest logit, and its probability; 0 if there are NaNs."""
    best, highest, total = 0, logits[0], np.float32(0.0)
    for i in range(1, logits.shape[0]):
        if logits[i] > highest:
            best, highest = i, logits[i]
    for i in range(logits.shape[0]):
        total += exp(logits[i] - highest)
    return best, np.float32(1.0) / total if total >= 1.0 else np.float32(0.0)  # 0 for NaN
