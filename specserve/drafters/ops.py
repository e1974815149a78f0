"""Tensor operations that both drafting models use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Guess = tuple[tuple[int, ...], tuple[float, ...]]
"""A draft's tokens, and the model's probability of each, those before it given."""

NO_GUESS: Guess = ((), ())


def laid_out(weight: Tensor) -> Tensor:
    """The same matrix ``[out, in]``, as ``F.linear`` multiplies fastest by it.

    In float32 on a CPU that is with its columns one after the other: up to twice as fast for the
    few rows that are drafted for.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.t().contiguous().t()
    return weight


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, int64 ``[n]``, and their probabilities, float32 ``[n]``.

    Args:
        logits: ``[n, vocab_size]``; where they are no numbers the probability is 0.
    """
    logits = logits.float()
    best, tokens = logits.max(-1, keepdim=True)
    return tokens.squeeze(-1), (logits - best).exp_().sum(-1).reciprocal_().nan_to_num_(0.0)


def guesses(steps: Sequence[tuple[Tensor, Tensor]], num_rows: int) -> list[Guess]:
    """What steps drafted for each row.

    Args:
        steps: of each step :func:`likeliest`, of the rows that went on to it: always the first
            ones of the step before.
        num_rows: rows; the last ones may have no draft.
    """
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in range(num_rows)]
    for tokens, chances in steps:
        pairs = zip(tokens.tolist(), chances.tolist(), strict=True)
        for (row_tokens, row_chances), (token, chance) in zip(found, pairs, strict=False):
            row_tokens.append(token)
            row_chances.append(chance)
    return [(tuple(tokens), tuple(chances)) for tokens, chances in found]
