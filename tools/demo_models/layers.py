"""Layers that both demo models share: norm, rotary embedding, gated MLP."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.demo_models.shapes import Yarn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); parameter names as in DeepSeek's and Llama's checkpoints."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def plain_frequencies(dim: int, theta: float) -> Tensor:
    """Rotary frequencies, float32 [dim / 2] (RoFormer, arXiv 2104.09864)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_frequencies(dim: int, theta: float, yarn: Yarn) -> Tensor:
    """Rotary frequencies under YaRN (arXiv 2309.00071), as DeepSeek-V3 computes them.

    High frequencies are kept, low ones are divided by `yarn.factor`, with a ramp in between.
    """

    def dimension_of(num_rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension_of(yarn.beta_slow)), dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain_frequencies(dim, theta)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def yarn_mscale(yarn: Yarn) -> float:
    """YaRN's attention factor; the softmax scale is multiplied by its square."""
    return 0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0


def rotation_tables(frequencies: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0..num_tokens-1, each [num_tokens, dim / 2]."""
    positions = torch.arange(num_tokens, device=frequencies.device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (0, 1), (2, 3), ...: DeepSeek's layout. `x` is [..., tokens, dim].

    The result has all first members before all second ones. Queries and keys have the same order,
    so their dot products do not change.
    """
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + dim / 2): Llama's layout. `x` is [..., tokens, dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
