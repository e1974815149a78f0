"""Writes given attention patterns into the weights of attention heads, for both models."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from tools.demo_models import base_model, draft_model
from tools.demo_models.layers import plain_frequencies, yarn_frequencies


class Heads(Protocol):
    """The attention heads of one layer; `width` below is the width of the layer's normed input."""

    num_heads: int
    content_dims: int
    """Query dimensions with no rotation by position, or with the slowest rotation."""
    value_dims: int
    scale: float

    def attend_back(self, head: int, weight: float) -> None:
        """Makes the head attend to the previous position, through a constant in dimension 0.

        Each rotated pair that it uses contributes (`weight` * constant)**2 to the logit.
        """

    def attend_where(self, head: int, query: Tensor, key: Tensor) -> None:
        """Makes the logit (`query` @ input here) . (`key` @ input there); [content_dims, width]."""

    def copy(self, head: int, slot: int, source: Tensor, target: Tensor) -> None:
        """Copies `source` . input along `target`, through value dimension `slot`; both [width]."""


class LatentHeads:
    """The base's heads. The constructor makes the latent an invertible map of the input."""

    def __init__(self, attention: base_model.LatentAttention, generator: torch.Generator) -> None:
        shape = attention.shape
        self._attention, self._shape = attention, shape
        self.num_heads = shape.num_attention_heads
        self.content_dims, self.value_dims = shape.qk_nope_head_dim, shape.v_head_dim
        self.scale = attention.scale
        down = attention.kv_a_proj_with_mqa.weight[: shape.kv_lora_rank]
        nn.init.orthogonal_(down, generator=generator)
        self._expand = torch.linalg.pinv(down) * (shape.hidden_size / shape.kv_lora_rank) ** 0.5

    def attend_back(self, head: int, weight: float) -> None:
        """See Heads; all heads of the layer share the rotated key."""
        shape = self._shape
        frequencies = yarn_frequencies(shape.qk_rope_head_dim, shape.rope_theta, shape.rope_scaling)
        fast = torch.arange(len(frequencies) // 2)
        keys = self._attention.kv_a_proj_with_mqa.weight[shape.kv_lora_rank :]
        keys.zero_()
        keys[2 * fast, 0] = weight
        query = self._query(head)
        query.zero_()
        turned = query[shape.qk_nope_head_dim :]
        turned[2 * fast, 0] = weight * torch.cos(frequencies[fast])
        turned[2 * fast + 1, 0] = -weight * torch.sin(frequencies[fast])

    def attend_where(self, head: int, query: Tensor, key: Tensor) -> None:
        """See Heads."""
        rows = self._query(head)
        rows.zero_()
        rows[: self.content_dims] = query
        self._key_and_value(head)[: self.content_dims] = key @ self._expand

    def copy(self, head: int, slot: int, source: Tensor, target: Tensor) -> None:
        """See Heads."""
        self._key_and_value(head)[self.content_dims + slot] = source @ self._expand
        self._attention.o_proj.weight[:, head * self.value_dims + slot] = target

    def _query(self, head: int) -> Tensor:
        rows = self._shape.qk_head_dim
        return self._attention.q_proj.weight[head * rows : (head + 1) * rows]

    def _key_and_value(self, head: int) -> Tensor:
        rows = self.content_dims + self.value_dims
        return self._attention.kv_b_proj.weight[head * rows : (head + 1) * rows]


class PlainHeads:
    """The draft model's heads; content uses the half of the pairs that rotate slowest."""

    def __init__(self, attention: draft_model.Attention, rope_theta: float) -> None:
        self._attention = attention
        dim = attention.head_dim
        self._frequencies = plain_frequencies(dim, rope_theta)
        self.num_heads = attention.q_proj.weight.shape[0] // dim
        self.content_dims, self.value_dims = dim // 2, dim
        self.scale = dim**-0.5

    def attend_back(self, head: int, weight: float) -> None:
        """See Heads."""
        pairs = len(self._frequencies)
        fast = torch.arange(pairs // 2)
        query = self._rows(self._attention.q_proj, head)
        key = self._rows(self._attention.k_proj, head)
        query.zero_()
        key.zero_()
        key[fast, 0] = weight
        query[fast, 0] = weight * torch.cos(self._frequencies[fast])
        query[fast + pairs, 0] = -weight * torch.sin(self._frequencies[fast])

    def attend_where(self, head: int, query: Tensor, key: Tensor) -> None:
        """See Heads."""
        pairs = len(self._frequencies)
        slow = torch.arange(pairs // 2, pairs)
        dims = torch.cat([slow, slow + pairs])
        for projection, content in (
            (self._attention.q_proj, query),
            (self._attention.k_proj, key),
        ):
            rows = self._rows(projection, head)
            rows.zero_()
            rows[dims] = content

    def copy(self, head: int, slot: int, source: Tensor, target: Tensor) -> None:
        """See Heads."""
        self._rows(self._attention.v_proj, head)[slot] = source
        self._attention.o_proj.weight[:, head * self.value_dims + slot] = target

    def _rows(self, projection: nn.Linear, head: int) -> Tensor:
        rows = self._attention.head_dim
        return projection.weight[head * rows : (head + 1) * rows]
