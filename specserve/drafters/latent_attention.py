"""Multi-head latent attention over a cache of latents, with its matrices absorbed.

DeepSeek-V2 (arXiv 2405.04434, section 2.1 and appendix C): a cache entry is what all heads' keys
and values are made of, ``kv_lora_rank`` numbers, and one rotated key that all heads share. Queries
are taken into the latents' space and results out of it, so that the cache is never expanded: a new
token costs little more than reading it once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    yarn_apply_mscale,
)

from specserve.drafters.kv_cache import Packed, Span, check_room
from specserve.drafters.ops import laid_out


class Weights(Protocol):
    """Where a layer gets its weights from."""

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor ``name`` of the layer, which must have this shape; dtype None: the model's."""
        ...


class LatentAttention:
    """The attention of one layer, and its cache.

    Args:
        config: transformers' DeepseekV3Config.
        weights: of ``self_attn``.
        num_slots: texts that the cache holds.
        max_entries: entries of each.

    Raises:
        ConfigError: the cache does not fit into the device's memory.
    """

    def __init__(self, config: Any, weights: Weights, num_slots: int, max_entries: int) -> None:
        self._heads = heads = config.num_attention_heads
        self._nope, self._rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self._value, self._latent = config.v_head_dim, config.kv_lora_rank
        self._eps = config.rms_norm_eps
        width, rank = config.hidden_size, config.q_lora_rank
        queries = heads * (self._nope + self._rope)
        self._query_down = self._query_norm = None
        if rank is None:
            self._query_up = laid_out(weights.get("q_proj.weight", queries, width))
        else:
            self._query_down = laid_out(weights.get("q_a_proj.weight", rank, width))
            self._query_norm = weights.get("q_a_layernorm.weight", rank)
            self._query_up = laid_out(weights.get("q_b_proj.weight", queries, rank))
        entry = self._latent + self._rope
        self._kv_down = laid_out(weights.get("kv_a_proj_with_mqa.weight", entry, width))
        self._kv_norm = weights.get("kv_a_layernorm.weight", self._latent)
        kv_up = weights.get("kv_b_proj.weight", heads * (self._nope + self._value), self._latent)
        kv_up = kv_up.view(heads, -1, self._latent)
        key_up, value_up = torch.split(kv_up, [self._nope, self._value], 1)
        self._key_up = key_up.contiguous()
        self._value_up = value_up.transpose(1, 2).contiguous()
        self._out = laid_out(weights.get("o_proj.weight", width, heads * self._value))
        self._scale = yarn_apply_mscale(config.rope_parameters, (self._nope + self._rope) ** -0.5)
        # Each ``[max_entries, qk_rope_head_dim / 2]``; transformers has them twice side by side.
        places = torch.arange(max_entries, device=kv_up.device)[None]
        tables = DeepseekV3RotaryEmbedding(config)(kv_up, places)
        self._cos, self._sin = (table[0, :, : self._rope // 2] for table in tables)
        num_bytes = num_slots * max_entries * entry * kv_up.itemsize
        check_room(num_slots, max_entries, num_bytes, kv_up.device)
        # Not zeroed: memory is taken only as texts grow into it.
        self.cache = kv_up.new_empty(num_slots, max_entries, entry)
        """``[num_slots, max_entries, kv_lora_rank + qk_rope_head_dim]``."""

    def write(self, x: Tensor, packed: Packed) -> None:
        """Writes new entries into the cache.

        Args:
            x: ``[total, hidden_size]``, normed.
            packed: where they belong.
        """
        latent, key = torch.split(F.linear(x, self._kv_down), [self._latent, self._rope], 1)
        latent = F.rms_norm(latent, (self._latent,), self._kv_norm, self._eps)
        key = rotate(key, self._cos[packed.positions], self._sin[packed.positions])
        self.cache[packed.slots, packed.positions] = torch.cat([latent, key], 1)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` entries of a slot into another."""
        self.cache[target, :length] = self.cache[source, :length]

    def read(self, x: Tensor, spans: Sequence[Span], positions: Tensor) -> Tensor:
        """What the last entries of n spans, which are written, see: all up to each of them.

        Args:
            x: ``[n, hidden_size]``, normed, of the last entry of each span.
            spans: n.
            positions: int64 ``[n]``, of these entries.

        Returns:
            ``[n, hidden_size]``.
        """
        query = x
        if self._query_down is not None and self._query_norm is not None:
            query = F.linear(query, self._query_down)
            query = F.rms_norm(query, self._query_norm.shape, self._query_norm, self._eps)
        query = F.linear(query, self._query_up).view(len(x), self._heads, -1)
        plain, turned = torch.split(query, [self._nope, self._rope], 2)
        plain = torch.bmm(plain.transpose(0, 1), self._key_up).transpose(0, 1)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        out = self._attend(torch.cat([plain, rotate(turned, cos, sin)], 2), spans)
        out = torch.bmm(out.transpose(0, 1), self._value_up).transpose(0, 1)
        return F.linear(out.reshape(len(x), -1), self._out)

    def _attend(self, queries: Tensor, spans: Sequence[Span]) -> Tensor:
        """Each text's heads over its own entries, which are read in place.

        ``queries`` is ``[n, heads, kv_lora_rank + qk_rope_head_dim]``, the result
        ``[n, heads, kv_lora_rank]``.
        """
        attend = attend_on_cpu if queries.device.type == "cpu" else attend_by_products
        pairs = zip(queries, spans, strict=True)
        texts = ((own, self.cache[span.slot, span.first : span.end]) for own, span in pairs)
        return torch.stack([attend(*text, self._latent, self._scale) for text in texts])


def attend_on_cpu(query: Tensor, entries: Tensor, latent: int, scale: float) -> Tensor:
    """Attention of all heads of one position over a text's entries.

    An entry's value is its beginning. Its end is taken for more of it and then left out: where
    keys and values are of one width torch's flash attention takes them, several times faster.

    Args:
        query: ``[heads, width]``.
        entries: ``[seen, width]``.
        latent: how many numbers of an entry are its value.
        scale: of the scores.

    Returns:
        ``[heads, latent]``.
    """
    # Each thread takes heads of its own; those of one thread share their reading of the entries.
    groups = math.gcd(len(query), torch.get_num_threads())
    seen = entries.expand(1, groups, -1, -1)
    queries = query.view(1, groups, -1, query.shape[1])
    out = F.scaled_dot_product_attention(queries, seen, seen, scale=scale)
    return out.reshape(query.shape)[:, :latent]


def attend_by_products(query: Tensor, entries: Tensor, latent: int, scale: float) -> Tensor:
    """The same for devices whose flash attention does not take entries as wide as these."""
    scores = (query * scale) @ entries.T
    return scores.softmax(1, dtype=torch.float32).to(entries.dtype) @ entries[:, :latent]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the pairs (0, 1), (2, 3), ... of the last dimension.

    The result has the pairs' first members in front of the second: queries and keys meet in dot
    products alone, which do not see the order.
    """
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
