"""How weights stand in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out(weight: Tensor) -> Tensor:
    """The same matrix ``[out, in]``, as ``F.linear`` multiplies fastest by it.

    In float32 on a CPU that is with its columns one after the other: up to twice as fast for the
    few rows that are drafted for.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.t().contiguous().t()
    return weight
