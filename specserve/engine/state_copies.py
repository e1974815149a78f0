"""Copies a step's hidden states from the device to the host, for drafters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specserve.core.types import Int32Array, Int64Array, UInt16Array


def copy_states(
    hidden: torch.Tensor, num_tokens: Int32Array, rows: Int64Array
) -> Callable[[], UInt16Array]:
    """Starts to copy some requests' states to the host, on a GPU asynchronously.

    Args:
        hidden: ``[>= sum(num_tokens), hidden_size]``, the requests' states one after another.
        num_tokens: int32 ``[n]``, number of states of each request.
        rows: int64 ``[r]``, indices of the requests whose states are copied.

    Returns:
        A function that waits for the copy and returns the bits of bfloat16 values, uint16
        ``[sum(num_tokens[rows]), hidden_size]``.
    """
    ends = np.cumsum(num_tokens)[rows]
    spans = zip((ends - num_tokens[rows]).tolist(), ends.tolist(), strict=True)
    parts = [hidden[begin:end] for begin, end in spans]
    chosen = torch.cat(parts or [hidden[:0]]).bfloat16()
    if not hidden.is_cuda:
        return lambda: np.asarray(chosen.view(torch.uint16).numpy())
    host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
    host.copy_(chosen, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> UInt16Array:
        copied.synchronize()
        return np.asarray(host.view(torch.uint16).numpy())

    return wait
