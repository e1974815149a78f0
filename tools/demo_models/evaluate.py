"""Measures the trained models on held-out modules: losses, acceptance, copying, loops."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from specserve.compare.corpus import Module
from specserve.core.errors import ConfigError
from tools.demo_models.base_model import BaseModel
from tools.demo_models.completions import COPY_KINDS, loop_share
from tools.demo_models.draft_model import DraftModel
from tools.demo_models.tasks import AllTasks
from tools.demo_models.tokenizer import encode_chat, encode_text

ROW_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class BaseScores:
    """The base's scores on held-out text: losses in nats per token, else shares from 0 to 1."""

    loss: float
    mtp_loss: float
    mtp_acceptance: float
    """Share of positions where the MTP layer's first draft token is the base's greedy choice."""
    chat_mtp_acceptance: float
    """The same, on the answers of chat tasks."""
    loops: float
    """Share of greedy completions of plain code that end in a loop."""
    copy_accuracy: dict[str, float]
    """By task: share of answer tokens that are the greedy choice after the correct prefix."""
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class DraftScores:
    """The draft model's scores on held-out text; the loss in nats per token."""

    loss: float
    acceptance: float
    """Share of positions where its greedy choice is the base's, on plain code."""
    chat_acceptance: float
    num_tokens: int


def held_out_rows(modules: list[Module], tokenizer: Tokenizer, num_tokens: int) -> Tensor:
    """Int64 rows [rows, ROW_TOKENS] drawn from all modules with a fixed seed.

    Raises:
        ConfigError: the modules are shorter than one row.
    """
    ids = [i for module in modules for i in encode_text(tokenizer, module.text)]
    rows = [ids[i : i + ROW_TOKENS] for i in range(0, len(ids) - ROW_TOKENS, ROW_TOKENS)]
    random.Random(0).shuffle(rows)
    if not rows:
        raise ConfigError("corpus", len(ids), f"{ROW_TOKENS} held-out tokens or more")
    return torch.tensor(rows[: max(1, num_tokens // ROW_TOKENS)])


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """An encoded task; `answer` is the index of the answer's first token in `ids`."""

    kind: str
    ids: list[int]
    answer: int


def held_out_dialogues(modules: list[Module], tokenizer: Tokenizer) -> list[Dialogue]:
    """20 tasks of each kind of COPY_KINDS, drawn with fixed seeds."""
    maker = AllTasks(modules)
    dialogues = []
    for kind in COPY_KINDS:
        rng = random.Random(kind)
        for _ in range(20):
            task = maker.draw(rng, 2000, kind)
            ids = encode_chat(tokenizer, task)
            prompt = encode_chat(tokenizer, task[:-1])
            dialogues.append(Dialogue(kind=kind, ids=ids, answer=len(prompt) + 1))
    return dialogues


@torch.no_grad()
def score_base(
    model: BaseModel, modules: list[Module], tokenizer: Tokenizer, num_tokens: int
) -> BaseScores:
    """Measures the base. Takes a few times as long as training on `num_tokens` tokens."""
    model.eval()
    device = model.embed_tokens.weight.device
    losses, mtp_losses, agreed = [], [], []
    rows = held_out_rows(modules, tokenizer, num_tokens)
    for row in torch.split(rows, 4):
        row = row.to(device)
        logits, guesses = _base_and_mtp(model, row)
        losses.append(F.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()))
        mtp_losses.append(F.cross_entropy(guesses.flatten(0, 1), row[:, 2:].flatten()))
        agreed.append((guesses.argmax(-1) == logits[:, 1:].argmax(-1)).float().mean())
    copied: dict[str, list[float]] = {kind: [] for kind in COPY_KINDS}
    chat_agreed = []
    for dialogue in held_out_dialogues(modules, tokenizer):
        ids = torch.tensor([dialogue.ids], device=device)
        logits, guesses = _base_and_mtp(model, ids)
        first = dialogue.answer
        right = logits[0, first - 1 :].argmax(-1) == ids[0, first:]
        copied[dialogue.kind].append(float(right.float().mean()))
        same = guesses[0, first - 2 :].argmax(-1) == logits[0, first - 1 :].argmax(-1)
        chat_agreed.append(float(same.float().mean()))
    return BaseScores(
        loss=_mean(losses),
        mtp_loss=_mean(mtp_losses),
        mtp_acceptance=_mean(agreed),
        chat_mtp_acceptance=_mean(chat_agreed),
        loops=loop_share(model, rows),
        copy_accuracy={kind: _mean(shares) for kind, shares in copied.items()},
        num_tokens=rows.numel(),
    )


@torch.no_grad()
def score_draft(
    model: DraftModel,
    base: BaseModel,
    modules: list[Module],
    tokenizer: Tokenizer,
    num_tokens: int,
) -> DraftScores:
    """Measures the draft model against the base."""
    model.eval()
    base.eval()
    device = model.embed_tokens.weight.device
    losses, agreed, chat_agreed = [], [], []
    rows = held_out_rows(modules, tokenizer, num_tokens)
    for row in torch.split(rows, 4):
        row = row.to(device)
        logits = model(row[:, :-1])
        wanted = base.lm_head(base.hidden(row[:, :-1])).argmax(-1)
        losses.append(F.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()))
        agreed.append((logits.argmax(-1) == wanted).float().mean())
    for dialogue in held_out_dialogues(modules, tokenizer):
        ids = torch.tensor([dialogue.ids], device=device)
        wanted = base.lm_head(base.hidden(ids[:, :-1])).argmax(-1)
        same = model(ids[:, :-1]).argmax(-1) == wanted
        chat_agreed.append(same[0, dialogue.answer - 1 :].float().mean())
    return DraftScores(
        loss=_mean(losses),
        acceptance=_mean(agreed),
        chat_acceptance=_mean(chat_agreed),
        num_tokens=rows.numel(),
    )


def _base_and_mtp(model: BaseModel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Logits for tokens 1..n-1 by the base, and for tokens 2..n-1 by the MTP layer."""
    hidden = model.hidden(rows[:, :-1])
    guessed = model.mtp_hidden(hidden[:, :-1], rows[:, 1:-1])
    return model.lm_head(hidden).float(), model.lm_head(guessed).float()


def _mean(values: list[Tensor] | list[float]) -> float:
    return float(sum(float(v) for v in values) / len(values))
