"""Writes an induction circuit into the initial weights, so that training starts with copying.

An induction head finds an earlier occurrence of the current token and copies the token after it
(Olsson et al., arXiv 2209.11895). A small model learns it only after many millions of tokens, more
than a CPU training has. So its two parts are set at the start. Layer 0 gives each position a code
of the previous token. Layer 1 attends to positions whose code matches the current token, and copies
the token there into the directions that the head reads. Training can change all these weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.demo_models.base_model import BaseModel, initialise_part
from tools.demo_models.draft_model import DraftModel
from tools.demo_models.heads import Heads, LatentHeads, PlainHeads

CONSTANT = 2.0
"""First dimension of every embedding, equal for all tokens. Attention by position reads it."""

TOKEN_STD = 0.5
CODE_GAIN = 0.5
POSITION_LOGIT = 4.0
"""Logit that each rotated pair contributes to attention to the previous position in layer 0."""

MATCH_LOGIT = 12.0
HEAD_GAIN = 0.16
COPY_GAIN = 1.5
"""Size of what the MTP layer's heads write, relative to its input."""

TIED_SCALE = 0.2
"""Gain of the final norm if embedding and head are tied. It keeps the initial logits small."""


@dataclass(frozen=True)
class Plan:
    """The dimensions of the hidden state that hold the token and the code of the previous token."""

    width: int

    @property
    def token(self) -> slice:
        """The token's dimensions: those after the constant, without the last third."""
        return slice(1, self.width - self.width // 3)

    @property
    def code(self) -> slice:
        """The code's dimensions: the last third."""
        return slice(self.width - self.width // 3, self.width)

    @property
    def num_token(self) -> int:
        """Number of dimensions that hold the token."""
        return self.width - self.width // 3 - 1

    def unit(self, dimension: int) -> Tensor:
        """The unit vector of one dimension, [width]."""
        row = torch.zeros(self.width)
        row[dimension] = 1.0
        return row


@torch.no_grad()
def plant_in_base(model: BaseModel, generator: torch.Generator) -> None:
    """Overwrites the embedding, the head and the attention of the first two layers."""
    plan = Plan(model.shape.hidden_size)
    embedding = model.embed_tokens.weight
    _embed(embedding, plan, generator)
    first, second = (LatentHeads(block.self_attn, generator) for block in model.blocks()[:2])
    half = plan.num_token // 2
    copied = _plant(first, second, embedding, plan, half, 1.0, generator)
    model.lm_head.weight.normal_(0, 0.002, generator=generator)
    for source, target in copied:
        model.lm_head.weight[:, target] = HEAD_GAIN * embedding[:, source]


@torch.no_grad()
def plant_in_draft(model: DraftModel, generator: torch.Generator) -> None:
    """Overwrites the tied embedding, the final norm and the attention of the first two layers."""
    plan = Plan(model.shape.hidden_size)
    embedding = model.embed_tokens.weight
    _embed(embedding, plan, generator)
    theta = model.shape.rope_theta
    first, second = (PlainHeads(block.self_attn, theta) for block in model.blocks()[:2])
    # The head also reads the current token from the hidden state. Gain 3 outweighs it.
    _plant(first, second, embedding, plan, 0, 3.0, generator)
    model.norm.weight.fill_(TIED_SCALE)
    model.norm.weight[0] = 0.0


@torch.no_grad()
def plant_in_mtp(model: BaseModel, rows: Tensor, generator: torch.Generator) -> None:
    """Initialises the MTP layer with an induction circuit; `rows` is int64 [rows, tokens].

    One layer is enough: position i has token i in the hidden state and token i + 1 in the
    embedding. It attends to positions whose hidden state holds token i + 1, and copies their next
    token. Ridge regression over `rows` finds how hidden states encode their token.
    """
    plan = Plan(model.shape.hidden_size)
    mtp = model.mtp
    initialise_part(mtp, generator)
    num_code = plan.width // 3
    reader = _orthonormal(num_code, plan.num_token, generator)
    embedded = mtp.enorm(model.embed_tokens.weight)[:, plan.token]
    hidden = mtp.hnorm(model.hidden(rows)).flatten(0, 1)
    codes = embedded[rows.flatten()] @ reader.T
    mtp.eh_proj.weight.normal_(0, 0.02, generator=generator)
    mtp.eh_proj.weight[: plan.code.start, : plan.code.start] = torch.eye(plan.code.start)
    mtp.eh_proj.weight[plan.code, plan.width :] = _ridge(hidden, codes)

    states = mtp.block.input_layernorm(
        mtp.eh_proj(torch.cat([mtp.enorm(model.embed_tokens(rows.flatten())), hidden], dim=-1))
    )
    heads = LatentHeads(mtp.block.self_attn, generator)
    mixes = [
        _orthonormal(min(heads.content_dims, num_code), num_code, generator)
        for _ in range(heads.num_heads)
    ]
    # These embeddings and hidden states are of equal tokens, as in a match.
    match = (states[:, plan.token] @ reader.T @ mixes[0].T) * (states[:, plan.code] @ mixes[0].T)
    sharpness = (MATCH_LOGIT / float(match.sum(dim=-1).mean() * heads.scale)) ** 0.5
    to_head = _ridge(model.lm_head.weight, embedded @ torch.linalg.inv(embedded.T @ embedded))
    to_head *= COPY_GAIN / (embedded @ to_head).pow(2).mean().sqrt()
    logit = (model.lm_head.weight @ to_head.T * embedded).sum(dim=-1).mean()
    mtp.norm.weight.fill_(float(MATCH_LOGIT * (1 + COPY_GAIN**2) ** 0.5 / logit))
    for head, mix in enumerate(mixes):
        query = torch.zeros(heads.content_dims, plan.width)
        key = torch.zeros(heads.content_dims, plan.width)
        query[: len(mix), plan.token] = sharpness * mix @ reader
        key[: len(mix), plan.code] = sharpness * mix
        heads.attend_where(head, query, key)
        for slot, dimension in enumerate(range(plan.num_token)[head :: heads.num_heads]):
            if slot < heads.value_dims:
                source = plan.unit(plan.token.start + dimension)
                heads.copy(head, slot, source, to_head[dimension])


def _ridge(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Ridge regression: W [outputs, inputs] that minimises |inputs @ W.T - outputs|."""
    gram = inputs.T @ inputs
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
    solution: Tensor = torch.linalg.solve(gram, inputs.T @ outputs).T
    return solution


def _embed(embedding: Tensor, plan: Plan, generator: torch.Generator) -> None:
    embedding.zero_()
    random = torch.randn(len(embedding), plan.num_token, generator=generator)
    embedding[:, plan.token] = TOKEN_STD * random
    embedding[:, 0] = CONSTANT


def _plant(
    first: Heads,
    second: Heads,
    embedding: Tensor,
    plan: Plan,
    shift: int,
    gain: float,
    generator: torch.Generator,
) -> list[tuple[int, int]]:
    """Writes both parts of the circuit.

    Returns:
        For each copied dimension: (its index in the embedding, its target in the hidden state).
    """
    rms = float(embedding.pow(2).mean(dim=-1).sqrt().mean())
    num_code = plan.width // 3
    reader = _orthonormal(num_code, plan.num_token, generator)
    weight = (POSITION_LOGIT / first.scale) ** 0.5 * rms / CONSTANT
    for i, row in enumerate(reader):
        head, slot = divmod(i, first.value_dims)
        if slot == 0:
            first.attend_back(head, weight)
        source = torch.zeros(plan.width)
        source[plan.token] = row
        first.copy(head, slot, source, CODE_GAIN * plan.unit(plan.code.start + i))

    code_std = CODE_GAIN * TOKEN_STD / rms
    moments = (CONSTANT**2, plan.num_token * TOKEN_STD**2, num_code * code_std**2)
    later_rms = (sum(moments) / plan.width) ** 0.5
    match = second.content_dims * TOKEN_STD * code_std / later_rms**2 * second.scale
    sharpness = (MATCH_LOGIT / match) ** 0.5
    copied = []
    for head in range(second.num_heads):
        mix = _orthonormal(min(second.content_dims, num_code), num_code, generator)
        query = torch.zeros(second.content_dims, plan.width)
        key = torch.zeros(second.content_dims, plan.width)
        query[: len(mix), plan.token] = sharpness * mix @ reader
        key[: len(mix), plan.code] = sharpness * mix
        second.attend_where(head, query, key)
        sources = range(plan.num_token)[head :: second.num_heads]
        for slot, dimension in enumerate(sources[: second.value_dims]):
            source = plan.token.start + dimension
            target = plan.token.start + (dimension + shift) % plan.num_token
            second.copy(head, slot, plan.unit(source), gain * plan.unit(target))
            copied.append((source, target))
    return copied


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    random = torch.randn(columns, columns, generator=generator)
    square: Tensor = torch.linalg.qr(random)[0]
    return square[:rows]
