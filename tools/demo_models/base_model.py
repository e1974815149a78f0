"""The demo base model for training: DeepSeek-V3's architecture with one MTP layer, in plain torch.

Follows the DeepSeek-V3 report (arXiv 2412.19437, section 2): multi-head latent attention, sigmoid
expert scores with load balancing by a bias (no auxiliary loss), and multi-token prediction.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.demo_models.layers import (
    GatedMLP,
    RMSNorm,
    rotate_interleaved,
    rotation_tables,
    yarn_frequencies,
    yarn_mscale,
)
from tools.demo_models.shapes import BaseShape

Rotation = tuple[Tensor, Tensor]


class LatentAttention(nn.Module):
    """Multi-head latent attention without query compression; keys and values are expanded."""

    def __init__(self, shape: BaseShape) -> None:
        super().__init__()
        self.shape = shape
        heads, width = shape.num_attention_heads, shape.hidden_size
        self.q_proj = nn.Linear(width, heads * shape.qk_head_dim, bias=False)
        latent = shape.kv_lora_rank
        self.kv_a_proj_with_mqa = nn.Linear(width, latent + shape.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(latent, shape.rms_norm_eps)
        expanded = heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        self.kv_b_proj = nn.Linear(latent, expanded, bias=False)
        self.o_proj = nn.Linear(heads * shape.v_head_dim, width, bias=False)
        mscale = yarn_mscale(shape.rope_scaling)
        self.scale = shape.qk_head_dim**-0.5 * mscale * mscale

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Causal attention; `x` and the result are [rows, tokens, hidden_size]."""
        shape = self.shape
        rows, tokens, _ = x.shape
        nope, rope, value = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim
        query = self.q_proj(x).view(rows, tokens, -1, shape.qk_head_dim).transpose(1, 2)
        q_pass, q_turn = query.split([nope, rope], dim=-1)
        latent, k_turn = self.kv_a_proj_with_mqa(x).split([shape.kv_lora_rank, rope], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent))
        expanded = expanded.view(rows, tokens, -1, nope + value).transpose(1, 2)
        k_pass, values = expanded.split([nope, value], dim=-1)
        k_turn = rotate_interleaved(k_turn.unsqueeze(1), *rotation).expand(*k_pass.shape[:-1], -1)
        query = torch.cat([q_pass, rotate_interleaved(q_turn, *rotation)], dim=-1)
        keys = torch.cat([k_pass, k_turn], dim=-1)
        # The fused kernels require values as wide as keys.
        values = F.pad(values, (0, shape.qk_head_dim - value))
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=self.scale)
        out = out[..., :value].transpose(1, 2).reshape(rows, tokens, -1)
        mixed: Tensor = self.o_proj(out)
        return mixed


class Router(nn.Module):
    """Selects experts by sigmoid score plus a bias without gradient; weighs them by score alone."""

    def __init__(self, shape: BaseShape) -> None:
        super().__init__()
        self.top_k = shape.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(shape.n_routed_experts, shape.hidden_size))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))
        self._loads: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and expert indices of every token, both [tokens, top_k]; weights sum to 1."""
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        experts = (scores.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.training:
            self._loads.append(experts.flatten().bincount(minlength=len(self.weight)))
        return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20), experts

    def balance(self, step: float) -> None:
        """Raises the bias by `step` below the mean load, lowers it above, and resets the loads."""
        load = torch.stack(self._loads).sum(dim=0).float()
        self._loads.clear()
        self.e_score_correction_bias += step * torch.sign(load.mean() - load)


class Experts(nn.Module):
    """The routed experts, stacked: gate and up [experts, inner, width], down transposed."""

    def __init__(self, shape: BaseShape) -> None:
        super().__init__()
        count, inner, width = (
            shape.n_routed_experts,
            shape.moe_intermediate_size,
            shape.hidden_size,
        )
        self.gate_proj = nn.Parameter(torch.empty(count, inner, width))
        self.up_proj = nn.Parameter(torch.empty(count, inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Weighted sums of the tokens' experts, [tokens, width].

        The (token, expert) pairs are sorted by expert, so that each expert runs once.
        """
        top_k = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=len(self.gate_proj)).tolist()
        pieces = torch.split(x[order // top_k], counts)
        outs = []
        for piece, gate, up, down in zip(
            pieces,
            self.gate_proj.unbind(),
            self.up_proj.unbind(),
            self.down_proj.unbind(),
            strict=True,
        ):
            outs.append(F.linear(F.silu(F.linear(piece, gate)) * F.linear(piece, up), down))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        out = torch.cat(outs)[back].view(*experts.shape, -1)
        return (out * weights.unsqueeze(-1).to(out.dtype)).sum(dim=1)


class MixtureOfExperts(nn.Module):
    """One shared expert and the routed experts."""

    def __init__(self, shape: BaseShape) -> None:
        super().__init__()
        self.gate = Router(shape)
        self.experts = Experts(shape)
        self.shared_experts = GatedMLP(shape.hidden_size, shape.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        flat = x.flatten(0, -2)
        weights, experts = self.gate(flat)
        mixed: Tensor = self.shared_experts(x) + self.experts(flat, weights, experts).view_as(x)
        return mixed


class Block(nn.Module):
    """A decoder layer with norms before attention and MLP."""

    def __init__(self, shape: BaseShape, *, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = LatentAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp: nn.Module = (
            GatedMLP(shape.hidden_size, shape.intermediate_size)
            if dense
            else MixtureOfExperts(shape)
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Same shape as `x`: [rows, tokens, hidden_size]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MTPLayer(nn.Module):
    """Predicts the token after next from the base's hidden state and the next token's embedding.

    Equals vLLM's `deepseek_mtp`: in the input of `eh_proj` the embedding is first, and zero at
    position 0. The hidden state is the base's after its final norm.
    """

    def __init__(self, shape: BaseShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.enorm = RMSNorm(width, eps)
        self.hnorm = RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = Block(shape, dense=False)
        self.norm = RMSNorm(width, eps)

    def forward(self, hidden: Tensor, embedded_next: Tensor, rotation: Rotation) -> Tensor:
        """Normed hidden states [rows, tokens, hidden_size], ready for the head."""
        embedded_next = torch.cat([torch.zeros_like(embedded_next[:, :1]), embedded_next[:, 1:]], 1)
        mixed = self.eh_proj(torch.cat([self.enorm(embedded_next), self.hnorm(hidden)], dim=-1))
        out: Tensor = self.norm(self.block(mixed, rotation))
        return out


class BaseModel(nn.Module):
    """The whole base model. The MTP layer shares its embedding and head."""

    def __init__(self, shape: BaseShape, *, max_tokens: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Block(shape, dense=i < shape.first_k_dense_replace)
            for i in range(shape.num_hidden_layers)
        )
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.mtp = MTPLayer(shape)
        frequencies = yarn_frequencies(shape.qk_rope_head_dim, shape.rope_theta, shape.rope_scaling)
        cos, sin = rotation_tables(frequencies, max_tokens)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def blocks(self) -> list[Block]:
        """The decoder layers."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    def hidden(self, tokens: Tensor) -> Tensor:
        """Hidden states after the final norm, [rows, tokens, hidden_size]."""
        rotation = self._rotation(tokens.shape[1])
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        out: Tensor = self.norm(x)
        return out

    def mtp_hidden(self, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        """The MTP layer's hidden states, [rows, tokens, hidden_size].

        `hidden` are the base's states of positions 0..n-1, `next_tokens` the tokens 1..n.
        """
        rotation = self._rotation(next_tokens.shape[1])
        out: Tensor = self.mtp(hidden, self.embed_tokens(next_tokens), rotation)
        return out

    def _rotation(self, num_tokens: int) -> Rotation:
        return self.cos[:num_tokens], self.sin[:num_tokens]

    def routers(self) -> list[Router]:
        """The routers of all layers, the MTP layer's last."""
        return [m for m in self.modules() if isinstance(m, Router)]


@torch.no_grad()
def initialise(model: BaseModel, generator: torch.Generator) -> None:
    """Initialises a model with random weights; embeddings have a standard deviation of 0.5."""
    initialise_part(model, generator)
    model.embed_tokens.weight.normal_(0, 0.5, generator=generator)


@torch.no_grad()
def initialise_part(part: nn.Module, generator: torch.Generator) -> None:
    """Initialises a part: matrices by input width, norms to 1, output projections near zero."""
    for name, parameter in part.named_parameters():
        width = parameter.shape[-1]
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "down_proj", "lm_head.weight")):
            parameter.normal_(0, 0.02 * width**-0.5, generator=generator)
        else:
            parameter.normal_(0, 0.7 * width**-0.5, generator=generator)
    for router in part.modules():
        if isinstance(router, Router):
            router.e_score_correction_bias.zero_()
