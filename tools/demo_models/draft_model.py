"""The draft model for training: a small Llama, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.demo_models.layers import (
    GatedMLP,
    RMSNorm,
    plain_frequencies,
    rotate_halves,
    rotation_tables,
)
from tools.demo_models.shapes import DraftShape


class Attention(nn.Module):
    """Multi-head attention with rotary position embedding."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.num_attention_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention; `x` and the result are [rows, tokens, hidden_size]."""
        rows, tokens, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(rows, tokens, -1, self.head_dim).transpose(1, 2)

        query = rotate_halves(heads(self.q_proj(x)), cos, sin)
        keys = rotate_halves(heads(self.k_proj(x)), cos, sin)
        values = heads(self.v_proj(x))
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, tokens, -1))
        return mixed


class Block(nn.Module):
    """A decoder layer with norms before attention and MLP."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMLP(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Same shape as `x`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DraftModel(nn.Module):
    """The draft model; embedding and head share one matrix."""

    def __init__(self, shape: DraftShape, *, max_tokens: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        cos, sin = rotation_tables(plain_frequencies(shape.head_dim, shape.rope_theta), max_tokens)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def blocks(self) -> list[Block]:
        """The decoder layers."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every next token, [rows, tokens, vocab_size]."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


@torch.no_grad()
def initialise(model: DraftModel, generator: torch.Generator) -> None:
    """Initialises matrices by input width, output projections near zero; norms stay at 1."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            continue
        width = parameter.shape[-1]
        if "embed_tokens" in name:
            parameter.normal_(0, 0.1, generator=generator)
        elif "o_proj" in name or "down_proj" in name:
            parameter.normal_(0, 0.02 * width**-0.5, generator=generator)
        else:
            parameter.normal_(0, 0.7 * width**-0.5, generator=generator)
