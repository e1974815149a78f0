"""DeepSeek's rotary embedding on CPU, in a form of which torch's compiler makes vector code.

vLLM leaves the rotated pairs of neighbouring numbers where they are. The compiled code then reads
cosines and sines one by one, again for each head: a sixth of a prefill step. Here, as in Hugging
Face's implementation, all first numbers of the pairs come before all second ones. Attention does
not depend on the order, because queries and keys have the same one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)

from specserve.drafters.ops import rotate

ORDER = "rotary embedding: first numbers of all pairs before second ones"
"""Describes the computation: a saved model that computes another one must not be loaded."""

_native = DeepseekScalingRotaryEmbedding.forward_native


def use_vector_rotary() -> None:
    """Lets DeepSeek's models rotate by the faster form, in this process."""
    DeepseekScalingRotaryEmbedding.forward_native = _forward


def _forward(
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replaces vLLM's method ``forward_native``, with the result in another order.

    Args:
        self: the embedding; with an order of its own already, or a part of a head that is not
            rotated, vLLM's method runs.
        positions: ``[n]``.
        query: ``[n, heads, d]``.
        key: ``[n, key heads, d]``.
        offsets: added to the positions.

    Returns:
        Query and key, rotated: ``d / 2`` first numbers of pairs, then as many second ones.
    """
    if key is None or self.is_neox_style or self.rotary_dim < self.head_size:
        unchanged: tuple[torch.Tensor, torch.Tensor | None]
        unchanged = _native(self, positions, query, key, offsets)
        return unchanged
    places = positions if offsets is None else positions + offsets
    cos, sin = self.cos_sin_cache[places].unsqueeze(-2).chunk(2, dim=-1)
    return rotate(query, cos, sin), rotate(key, cos, sin)
