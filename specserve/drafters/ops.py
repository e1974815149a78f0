"""Tensor operations of the drafting models. The target on CPU rotates by the same function."""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out(weight: Tensor) -> Tensor:
    """The same matrix ``[out, in]`` in the memory layout that is fastest for ``F.linear``.

    For float32 on a CPU that is column-major: up to twice as fast for the few rows of a draft step.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.t().contiguous().t()
    return weight


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most_likely tokens, int64 ``[n]``, and their probabilities, float32 ``[n]``.

    Args:
        logits: ``[n, vocab_size]``; the probability of NaN logits is 0.
    """
    logits = logits.float()
    best, tokens = logits.max(-1, keepdim=True)
    return tokens.squeeze(-1), (logits - best).exp_().sum(-1).reciprocal_().nan_to_num_(0.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the pairs (0, 1), (2, 3), ... of the last dimension.

    The result has all first members before all second ones. Queries and keys are used only in dot
    products, which do not depend on this order.
    """
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
