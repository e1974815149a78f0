"""Draws tokens from logits and compares them with drafts, in one compiled call.

Imports neither torch nor vLLM, as ``make setup`` compiles it before the engine is started.
"""

from __future__ import annotations

import numpy as np

from specserve.core.compile import direct, inner, kernel, kernel_array, vector
from specserve.core.types import Float32Array, Float64Array, Int32Array, Int64Array
from specserve.core.vector_kernels import exp

NO_TOKEN = -1
"""Fills a row of the result after its last token."""

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
        given = rows, drafts, floats, np.zeros(0), rows, False
        self._verify = direct(verify, logits, rows, *given, self._scratch, found)

    def verify(
        self,
        logits: Float32Array,
        counts: Int64Array,
        drafts: Int32Array,
        scales: Float32Array,
        randoms: Float64Array,
        bonus: Int64Array | None = None,
    ) -> Int32Array:
        """Draws a token for each position, up to the first that differs from its draft token.

        Args:
            logits: float32 ``[rows, vocab_size]``: those of each draft token and, without
                ``bonus``, of the token after the draft, request by request.
            counts: int64 ``[n]``, draft tokens of each request.
            drafts: int32 ``[sum(counts)]``, the draft tokens.
            scales: float32 ``[n]``, factors of the logits; 0: the most likely token is taken.
            randoms: float64 ``[rows]``, random numbers in [0, 1).
            bonus: int64 ``[n]``, the tokens after the drafts; None: they are drawn here.

        Returns:
            int32 ``[n, longest draft + 1]``: accepted tokens and one more, then -1.
        """
        if (vocab_size := logits.shape[1]) != len(self._scratch[0]):
            sizes = vocab_size, -(-vocab_size // _BLOCK)
            self._scratch = np.zeros(sizes[0], np.float32), np.zeros(sizes[1], np.float32)
        draws_bonus, total = bonus is None, int(counts.sum())
        bonus = np.zeros(len(counts), np.int64) if bonus is None else bonus
        num_rows = total + len(counts) if draws_bonus else total
        assert (len(drafts), len(logits), len(randoms)) == (total, num_rows, num_rows)
        assert len(scales) == len(bonus) == len(counts)
        found = np.full((len(counts), counts.max(initial=0) + 1), NO_TOKEN, np.int32)
        logits, drafts = kernel_array(logits, np.float32), kernel_array(drafts, np.int32)
        given = counts, drafts, scales, randoms, bonus, draws_bonus
        self._verify(logits, logits.argmax(axis=1), *given, self._scratch, found)
        return found


@kernel
def verify(  # type: ignore[no-untyped-def]
    logits, best, counts, drafts, scales, randoms, bonus, draws_bonus, scratch, found
):
    """See :meth:`Verifier.verify`; ``best`` is the most likely token of each row."""
    row = begin = 0
    for request in range(counts.shape[0]):
        count, scale = counts[request], scales[request]
        num_rows = count + 1 if draws_bonus else count
        num_right = 0
        for j in range(num_rows):
            token = best[row + j]
            if scale > 0.0:
                token = _draw(logits[row + j], token, scale, randoms[row + j], scratch)
            found[request, j] = token
            if j < count and token != drafts[begin + j]:
                break
            num_right += 1
        if num_right == num_rows and not draws_bonus:
            found[request, count] = bonus[request]
        row += num_rows
        begin += count


@inner
def _draw(logits, best, scale, random, scratch):  # type: ignore[no-untyped-def]
    weights, sums = scratch
    total = _weigh(logits, logits[best], scale, weights, sums)
    sought, passed = random * total, 0.0
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
        begin, end = block * _BLOCK, (block + 1) * _BLOCK
        of_logits, of_weights, part = logits[begin:end], weights[begin:end], np.float32(0.0)
        for i in range(of_weights.shape[0]):  # slices, so that this becomes vector instructions
            exponent = (of_logits[i] - highest) * scale
            weight = exp(exponent)
            weight = weight if exponent > _MIN_EXPONENT else np.float32(0.0)
            of_weights[i] = weight
            part += weight
        sums[block] = part
        total += float(part)
    return total
