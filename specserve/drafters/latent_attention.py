"""Multi-head latent attention over a cache of latents, with absorbed matrices.

DeepSeek-V2 (arXiv 2405.04434, section 2.1 and appendix C): a cache entry has ``kv_lora_rank``
numbers, from which all heads' keys and values follow, and one rotated key that all heads share.
Queries are projected into the latent space and results out of it. So the cache is never expanded,
and a new token costs little more than reading the cache once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    yarn_apply_mscale,
)

from specserve.drafters.kv_cache import Packed, Span, check_room, similar_lengths
from specserve.drafters.mtp_weights import MtpWeights
from specserve.drafters.ops import laid_out, rotate


class LatentAttention:
    """The attention of one layer, with its cache.

    Args:
        config: transformers' DeepseekV3Config.
        weights: weights of ``self_attn``.
        num_slots: texts that the cache holds.
        max_entries: entries of each text.

    Raises:
        ConfigError: the cache does not fit into the device's memory.
    """

    def __init__(self, config: Any, weights: MtpWeights, num_slots: int, max_entries: int) -> None:
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
        self.scale = yarn_apply_mscale(config.rope_parameters, (self._nope + self._rope) ** -0.5)
        # Each ``[max_entries, qk_rope_head_dim / 2]``; transformers repeats these columns once.
        places = torch.arange(max_entries, device=kv_up.device)[None]
        tables = DeepseekV3RotaryEmbedding(config)(kv_up, places)
        self.cos, self.sin = (table[0, :, : self._rope // 2] for table in tables)
        num_bytes = num_slots * max_entries * entry * kv_up.itemsize
        check_room(num_slots, max_entries, num_bytes, kv_up.device)
        # Not zeroed: on a CPU, only entries that have been written take memory.
        self.cache = kv_up.new_empty(num_slots, max_entries, entry)
        """``[num_slots, max_entries, kv_lora_rank + qk_rope_head_dim]``."""

    def write(self, x: Tensor, packed: Packed) -> None:
        """Writes new entries into the cache.

        Args:
            x: ``[total, hidden_size]``, normed.
            packed: the entries' places in the cache.
        """
        latent, key = torch.split(F.linear(x, self._kv_down), [self._latent, self._rope], 1)
        latent = F.rms_norm(latent, (self._latent,), self._kv_norm, self._eps)
        key = rotate(key, self.cos[packed.positions], self.sin[packed.positions])
        self.cache[packed.slots, packed.positions] = torch.cat([latent, key], 1)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` entries of a slot into another."""
        self.cache[target, :length] = self.cache[source, :length]

    def read(self, x: Tensor, spans: Sequence[Span], positions: Tensor) -> Tensor:
        """Attention output of the last entry of n spans, over all written entries up to it.

        Args:
            x: ``[n, hidden_size]``, normed, of each span's last entry.
            spans: n spans.
            positions: int64 ``[n]``, positions of these entries.

        Returns:
            ``[n, hidden_size]``.
        """
        query = x
        if self._query_down is not None and self._query_norm is not None:
            query = F.linear(query, self._query_down)
            query = F.rms_norm(query, self._query_norm.shape, self._query_norm, self._eps)
        query = F.linear(query, self._query_up).view(len(x), self._heads, -1)
        nope, rope = torch.split(query, [self._nope, self._rope], 2)
        nope = torch.bmm(nope.transpose(0, 1), self._key_up).transpose(0, 1)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        out = self._attend(torch.cat([nope, rotate(rope, cos, sin)], 2), spans)
        out = torch.bmm(out.transpose(0, 1), self._value_up).transpose(0, 1)
        return F.linear(out.reshape(len(x), -1), self._out)

    def _attend(self, queries: Tensor, spans: Sequence[Span]) -> Tensor:
        """Attention of each text's heads over its own entries.

        ``queries`` is ``[n, heads, kv_lora_rank + qk_rope_head_dim]``, the result
        ``[n, heads, kv_lora_rank]``.
        """
        if queries.device.type != "cpu":
            return attend_in_batches(queries, self.cache, spans, self._latent, self.scale)
        pairs = zip(queries, spans, strict=True)
        texts = ((own, self.cache[span.slot, span.first : span.end]) for own, span in pairs)
        return torch.stack([attend_on_cpu(*text, self._latent, self.scale) for text in texts])


def attend_on_cpu(query: Tensor, entries: Tensor, latent: int, scale: float) -> Tensor:
    """Attention of all heads of one position over a text's entries.

    An entry's first ``latent`` numbers are its value. The whole entry is passed as the value, and
    the surplus is cut off: torch's flash attention, several times faster, needs equal widths.

    Args:
        query: ``[heads, width]``.
        entries: ``[seen, width]``.
        latent: width of the value.
        scale: factor of the scores.

    Returns:
        ``[heads, latent]``.
    """
    # One group of heads per thread; the heads of a group read the entries together.
    groups = math.gcd(len(query), torch.get_num_threads())
    seen = entries.expand(1, groups, -1, -1)
    queries = query.view(1, groups, -1, query.shape[1])
    out = F.scaled_dot_product_attention(queries, seen, seen, scale=scale)
    return out.reshape(query.shape)[:, :latent]


def attend_in_batches(
    queries: Tensor, cache: Tensor, spans: Sequence[Span], latent: int, scale: float
) -> Tensor:
    """Attention as :func:`attend_on_cpu`, of n texts, for GPUs: calls cost more than copies.

    Texts of similar lengths are gathered into a batch. Shorter ones are padded by repeating their
    last entry, so no unwritten entry is read. Matrix products compute it, because flash attention
    refuses entries this wide.

    Args:
        queries: ``[n, heads, width]``.
        cache: ``[num_slots, max_entries, width]``.
        spans: n spans; each text's last entry attends to all of its entries.
        latent: width of the value.
        scale: factor of the scores.

    Returns:
        ``[n, heads, latent]``.
    """
    places = np.array([(span.slot, span.first, span.end) for span in spans])
    out = queries.new_empty(*queries.shape[:2], latent)
    for rows in similar_lengths(places[:, 2] - places[:, 1]):
        slots, firsts, ends = torch.as_tensor(places[rows].T, device=cache.device)[..., None]
        longest = int((places[rows, 2] - places[rows, 1]).max())
        positions = firsts + torch.arange(longest, device=cache.device)
        entries = cache[slots, positions.minimum(ends - 1)]
        own = torch.as_tensor(rows, device=cache.device)
        scores = torch.bmm(queries[own] * scale, entries.transpose(1, 2))
        scores.masked_fill_((positions >= ends).unsqueeze(1), -torch.inf)
        shares = scores.softmax(2, dtype=torch.float32).to(entries.dtype)
        out[own] = torch.bmm(shares, entries[..., :latent])
    return out
