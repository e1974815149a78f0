"""Greedy completions of held-out prompts: samples for the card, and how many end in a loop."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from specserve.compare.corpus import Module
from tools.demo_models.base_model import BaseModel
from tools.demo_models.tasks import AllTasks
from tools.demo_models.tokenizer import END_ID, encode_chat, encode_text

COPY_KINDS = ("quote", "rename", "repeat")
"""Tasks whose answers are copied from the prompt."""

LOOP_PROMPT_TOKENS = 128
LOOP_COMPLETION_TOKENS = 128
LOOP_TAIL_TOKENS = 64
LOOP_MAX_PERIOD = 16


@torch.no_grad()
def complete(model: BaseModel, prompts: Tensor, max_tokens: int) -> list[list[int]]:
    """Greedy continuations of int64 `prompts` [rows, tokens], each without its end token.

    The model has no KV cache, so every token recomputes the whole rows.
    """
    model.eval()
    ids = prompts.to(model.embed_tokens.weight.device)
    for _ in range(max_tokens):
        best = model.lm_head(model.hidden(ids)[:, -1]).argmax(dim=-1, keepdim=True)
        ids = torch.cat([ids, best], dim=1)
        if bool((ids[:, prompts.shape[1] :] == END_ID).any(dim=1).all()):
            break
    written: list[list[int]] = ids[:, prompts.shape[1] :].tolist()
    return [row[: row.index(END_ID)] if END_ID in row else row for row in written]


def ends_in_a_loop(tokens: Sequence[int]) -> bool:
    """Whether the last 64 tokens repeat with a period of at most 16; False for fewer tokens."""
    tail = list(tokens[-LOOP_TAIL_TOKENS:])
    return len(tail) == LOOP_TAIL_TOKENS and any(
        tail[period:] == tail[:-period] for period in range(1, LOOP_MAX_PERIOD + 1)
    )


def loop_share(model: BaseModel, rows: Tensor) -> float:
    """Share of greedy completions that end in a loop; each row's first 128 tokens are a prompt.

    A completion that ends before its 128th token does not count as a loop.
    """
    written = complete(model, rows[:, :LOOP_PROMPT_TOKENS], LOOP_COMPLETION_TOKENS)
    loops = [len(w) == LOOP_COMPLETION_TOKENS and ends_in_a_loop(w) for w in written]
    return sum(loops) / len(loops)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A held-out prompt or its end, the base's completion, and the reference (`wanted`)."""

    kind: str
    prompt: str
    completion: str
    wanted: str


def samples(model: BaseModel, modules: list[Module], tokenizer: Tokenizer) -> list[Sample]:
    """Greedy completions: two of plain code, one of each task of COPY_KINDS, one of `complete`."""
    shown = []
    for module in modules[1:3]:
        ids = encode_text(tokenizer, module.text)[:260]
        written = complete(model, torch.tensor([ids[:200]]), 60)[0]
        shown.append(
            Sample(
                kind="code",
                prompt=tokenizer.decode(ids[120:200]),
                completion=tokenizer.decode(written),
                wanted=tokenizer.decode(ids[200:]),
            )
        )
    maker = AllTasks(modules)
    for kind in (*COPY_KINDS, "complete"):
        messages = maker.draw(random.Random(f"sample {kind}"), 900, kind)
        prompt = encode_chat(tokenizer, messages[:-1], add_generation_prompt=True)
        written = complete(model, torch.tensor([prompt]), 80)[0]
        shown.append(
            Sample(
                kind=kind,
                prompt=messages[-2]["content"],
                completion=tokenizer.decode(written),
                wanted=messages[-1]["content"],
            )
        )
    return shown
