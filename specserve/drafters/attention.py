"""Attention of new tokens of many texts at once, each over its own text in the KV cache.

The new tokens of all texts are concatenated into a batch of one row, so nothing outside attention
computes padding. transformers calls :func:`attend` through its ``AttentionInterface``. Cache and
positions reach it as the model's keyword argument ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from specserve.core.types import Int64Array
from specserve.drafters.kv_cache import KVCache, Packed, Span, similar_lengths

NAME = "specserve_slots"
"""Name of this attention among transformers' implementations."""

_REFUSED_OPTIONS = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Options of transformers' attention that are not supported here."""


class UnsupportedAttention(ValueError):
    """A model needs more than plain causal attention; the message names what."""


Step = Callable[[int, Tensor, Tensor, Tensor, float | None], Tensor]
"""One forward's attention in one layer.

Takes the layer's index, ``[query_heads, n, key_dim]`` queries of the n new tokens,
``[heads, n, key_dim]`` keys with rotary positions applied, ``[heads, n, value_dim]`` values, and
the scale of the scores, None: ``key_dim ** -0.5``. Returns ``[n, query_heads, value_dim]``.
"""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    step: Step | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; tensors are ``[1, heads, n, dim]``.

    Raises:
        UnsupportedAttention: the model needs more than plain causal attention, or does not pass
            ``step`` on.
    """
    if step is None:
        raise UnsupportedAttention("layers that pass no keywords on to their attention")
    for name in _REFUSED_OPTIONS:
        if options.get(name) is not None:
            raise UnsupportedAttention(f"{name} in its attention")
    return step(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register(NAME, attend)


def cached_step(cache: KVCache, packed: Packed) -> Step:
    """One forward's attention: writes the new entries into the cache, attends to all up to them."""
    places = packed.slots * cache.max_tokens + packed.positions
    reader = RowByRow if places.device.type == "cpu" else Padded
    read = reader(cache, packed.spans).attend

    def step(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        cache.write(layer, places, key.transpose(0, 1), value.transpose(0, 1))
        return read(layer, query, scale)

    return step


class RowByRow:
    """Reads the cache in place, text by text: on a CPU, copies cost more than calls."""

    def __init__(self, cache: KVCache, spans: Sequence[Span]) -> None:
        self._cache = cache
        self._spans = spans
        self._masks = [_causal_mask(span, cache.keys[0].dtype) for span in spans]

    def attend(self, layer: int, query: Tensor, scale: float | None) -> Tensor:
        """``[query_heads, n, key_dim]`` to ``[n, query_heads, value_dim]``."""
        outputs = []
        lengths = [span.end - span.start for span in self._spans]
        parts = torch.split(query, lengths, dim=1)
        for span, mask, part in zip(self._spans, self._masks, parts, strict=True):
            keys = self._cache.keys[layer][span.slot, : span.end].transpose(0, 1)
            values = self._cache.values[layer][span.slot, : span.end].transpose(0, 1)
            outputs.append(_grouped(part[None], keys[None], values[None], mask, scale)[0])
        return torch.cat(outputs, dim=1).transpose(0, 1)


class Padded:
    """Gathers texts of similar lengths into batches: on a GPU, calls cost more than copies."""

    def __init__(self, cache: KVCache, spans: Sequence[Span]) -> None:
        ends = np.array([span.end for span in spans])
        counts = ends - [span.start for span in spans]
        firsts = np.cumsum(counts) - counts
        groups = similar_lengths(ends)
        self._batches = [
            _Batch(cache, [spans[row] for row in group], firsts[group]) for group in groups
        ]
        tokens = [firsts[row] + np.arange(counts[row]) for group in groups for row in group]
        order = np.argsort(np.concatenate(tokens))
        self._order = torch.as_tensor(order, device=cache.keys[0].device)

    def attend(self, layer: int, query: Tensor, scale: float | None) -> Tensor:
        """``[query_heads, n, key_dim]`` to ``[n, query_heads, value_dim]``."""
        outputs = [batch.attend(layer, query, scale) for batch in self._batches]
        return torch.cat(outputs)[self._order]


class _Batch:
    """Some of the texts; ``firsts`` holds the place of each one's first token among all tokens.

    Shorter texts are padded by repeating their last position, so no unwritten entry is read.
    """

    def __init__(self, cache: KVCache, spans: Sequence[Span], firsts: Int64Array) -> None:
        self._cache = cache
        device = cache.keys[0].device
        slots, begins, ends = np.array([(s.slot, s.start, s.end) for s in spans]).T[..., None]
        counts = ends - begins
        positions = np.minimum(np.arange(ends.max()), ends - 1)
        steps = np.minimum(np.arange(counts.max()), counts - 1)
        visible = np.arange(ends.max()) <= (begins + steps)[..., None]
        self._read = torch.as_tensor(slots * cache.max_tokens + positions, device=device)
        self._queries = torch.as_tensor(firsts[:, None] + steps, device=device)
        self._mask = torch.as_tensor(visible, device=device)[:, None]
        # Indices, not a mask: counting the elements of a mask would wait for the device.
        real = np.flatnonzero(np.arange(counts.max()) < counts)
        self._real = torch.as_tensor(real, device=device)

    def attend(self, layer: int, query: Tensor, scale: float | None) -> Tensor:
        """``[query_heads, n, key_dim]`` to ``[m, query_heads, value_dim]`` of these texts."""
        keys = self._cache.keys[layer].flatten(0, 1)[self._read].transpose(1, 2)
        values = self._cache.values[layer].flatten(0, 1)[self._read].transpose(1, 2)
        queries = query[:, self._queries].transpose(0, 1)
        output = _grouped(queries, keys, values, self._mask, scale)
        return output.transpose(1, 2).flatten(0, 1)[self._real]


def _causal_mask(span: Span, dtype: torch.dtype) -> Tensor | None:
    """``[1, 1, m, end]``, -inf where a token may not attend; None: one token attends to all."""
    num_new = span.end - span.start
    if num_new == 1:
        return None
    return torch.full((1, 1, num_new, span.end), -torch.inf, dtype=dtype).triu_(span.start + 1)


def _grouped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Grouped-query attention without repeating keys.

    The query heads of a group become further queries of their shared key head.

    Args:
        query: ``[b, query_heads, m, key_dim]``.
        keys: ``[b, heads, t, key_dim]``.
        values: ``[b, heads, t, value_dim]``.
        mask: ``[b, 1, m, t]``, bool or added to the scores; None: no mask.
        scale: factor of the scores; None: ``key_dim ** -0.5``.

    Returns:
        ``[b, query_heads, m, value_dim]``.
    """
    batch, num_query_heads, num_queries, _ = query.shape
    num_heads = keys.shape[1]
    group = num_query_heads // num_heads
    output = scaled_dot_product_attention(
        query.reshape(batch, num_heads, group * num_queries, -1),
        keys,
        values,
        mask if mask is None or group == 1 else mask.repeat(1, 1, group, 1),
        scale=scale,
    )
    return output.reshape(batch, num_query_heads, num_queries, -1)
