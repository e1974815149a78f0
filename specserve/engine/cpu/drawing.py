"""Draws tokens from logits and compares them with drafts, in one compiled call.

Imports neither torch nor vLLM, as ``make setup`` compiles it before the engine is started.
"""

from __future__ import annotations

import numpy as np

from specserve.core.compile import direct, inner, kernel, kernel_array, vector
from specserve.core.types import Float32Array, Float64Array, Int32Array, Int64Array
from specserve.core.vector_kernels import exp

NOT_DRAWN = -1
"""A bonus token that :func:`verify` draws itself, and the rest of a row of its result."""

_BLOCK = 256
"""Tokens whose weights are summed together. A draw adds up blocks, then the tokens of one."""

_MIN_EXPONENT = np.float32(-80.0)
"""Tokens whose probability is below ``e**-80`` of the highest are never drawn; float32 could not
hold the weight of some of them."""


class Verifier:
    """Verifies drafts. The machine code is made or loaded at the start."""

    def __init__(self) -> None:
        rows, drafts, floats = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)
        self._scratch = floats, floats
        logits, found = np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int32)
        self._verify = direct(
            verify, logits, rows, drafts, floats, np.zeros(0), rows, self._scratch, found
        )

    def verify(
        self,
        logits: Float32Array,
        counts: Int64Array,
        drafts: Int32Array,
        scales: Float32Array,
        places: Float64Array,
        bonus: Int64Array,
    ) -> Int32Array:
        """Draws a token for each position, up to the first that differs from its draft token.

        Args:
            logits: float32 ``[rows, vocab_size]``: those of each draft token and, if the bonus
                token is drawn here, of the token after the draft, request by request.
            counts: int64 ``[n]``, draft tokens of each request.
            drafts: int32 ``[sum(counts)]``, the draft tokens.
            scales: float32 ``[n]``, factors of the logits; 0: the most likely token is taken.
            places: float64 ``[rows]``, from 0 up to 1: random numbers.
            bonus: int64 ``[n]``, tokens after the drafts; ``NOT_DRAWN``: drawn here.

        Returns:
            int32 ``[n, longest draft + 1]``: accepted tokens and one more, then -1.
        """
        if (vocab_size := logits.shape[1]) != len(self._scratch[0]):
            sizes = vocab_size, -(-vocab_size // _BLOCK)
            self._scratch = np.zeros(sizes[0], np.float32), np.zeros(sizes[1], np.float32)
        found = np.full((len(counts), counts.max(initial=0) + 1), NOT_DRAWN, np.int32)
        logits, drafts = kernel_array(logits, np.float32), kernel_array(drafts, np.int32)
        self._verify(logits, counts, drafts, scales, places, bonus, self._scratch, found)
        return found


@kernel
def verify(logits, counts, drafts, scales, places, bonus, scratch, found):  # type: ignore[no-untyped-def]
    """See :meth:`Verifier.verify`."""
    row = begin = 0
    for request in range(counts.shape[0]):
        count, scale = counts[request], scales[request]
        num_rows = count + 1 if bonus[request] == NOT_DRAWN else count
        found[request, count] = bonus[request]
        for j in range(num_rows):
            token = _draw(logits[row + j], scale, places[row + j], scratch[0], scratch[1])
            found[request, j] = token
            if j < count and token != drafts[begin + j]:
                found[request, count] = NOT_DRAWN
                break
        row += num_rows
        begin += count


@inner
def _draw(logits, scale, place, weights, sums):  # type: ignore[no-untyped-def]
    best = 0
    for token in range(1, logits.shape[0]):
        if logits[token] > logits[best]:
            best = token
    if scale == 0.0:
        return best
    total = _weigh(logits, logits[best], scale, weights, sums)
    sought, passed = place * total, 0.0
    block = 0
    while block < sums.shape[0] - 1 and passed + sums[block] <= sought:
        passed += sums[block]
        block += 1
    found = best
    for token in range(block * _BLOCK, min((block + 1) * _BLOCK, weights.shape[0])):
        if weights[token] > 0.0:
            found = token
            passed += weights[token]
            if passed > sought:
                break
    return found


@vector
def _weigh(logits, highest, scale, weights, sums):  # type: ignore[no-untyped-def]
    """Writes each token's weight, and the sums of blocks; returns the sum of all."""
    total = 0.0
    for block in range(sums.shape[0]):
        part = np.float32(0.0)
        for token in range(block * _BLOCK, min((block + 1) * _BLOCK, weights.shape[0])):
            exponent = (logits[token] - highest) * scale
            weights[token] = exp(exponent) if exponent > _MIN_EXPONENT else np.float32(0.0)
            part += weights[token]
        sums[block] = part
        total += float(part)
    return total
