"""The training stream: documents drawn by index from a seed and packed into rows of tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from specserve.compare.corpus import Module
from tools.demo_models.tasks import AllTasks
from tools.demo_models.tokenizer import BOS_ID, END_ID, SPECIAL_TOKENS, encode_chat, encode_text

CHARS_PER_TOKEN = 3
TASK_SHARE = 0.5
"""Share of the tokens that chat tasks get; plain code gets as many."""

DRILL_CHANCE = 0.08
"""Share of the documents that are drills: a short span of random tokens or code, again and again.
Nothing but attention to what stood before can predict them."""


@dataclass
class Position:
    """Where a stream stands; with the seed it is all that a resumed run needs."""

    plain_tokens: int = 0
    task_tokens: int = 0
    document: int = 0
    epoch: int = 0
    module: int = 0
    offset: int = 0
    rest: list[int] = field(default_factory=list)
    """Tokens drawn and not yet handed out."""


class TokenStream:
    """An endless, seeded sequence of packed rows; equal positions give equal rows.

    Plain modules come in a new random order each epoch, in pieces; tasks are drawn anew each time.
    """

    def __init__(self, modules: list[Module], tokenizer: Tokenizer, *, seed: str) -> None:
        self._texts = [encode_text(tokenizer, m.text) for m in modules]
        self._maker = AllTasks(modules)
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.get_vocab_size()
        self._seed = seed
        self.position = Position()

    def rows(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """The next rows, int64 [num_rows, num_tokens]; documents run over from row to row."""
        need = num_rows * num_tokens
        buffer = self.position.rest
        while len(buffer) < need:
            buffer.extend(self._next_document(num_tokens))
        self.position.rest = buffer[need:]
        return torch.tensor(buffer[:need], dtype=torch.int64).view(num_rows, num_tokens)

    def _next_document(self, row_tokens: int) -> list[int]:
        at = self.position
        rng = random.Random(f"{self._seed}:{at.document}")
        at.document += 1
        if rng.random() < DRILL_CHANCE:
            return self._drill(rng, row_tokens // 2)
        if at.task_tokens * (1 - TASK_SHARE) <= at.plain_tokens * TASK_SHARE:
            limit = rng.choice([0.3, 0.6, 0.9]) * row_tokens * CHARS_PER_TOKEN
            ids = encode_chat(self._tokenizer, self._maker.draw(rng, int(limit)).messages)
            at.task_tokens += len(ids)
            return ids
        ids = self._next_piece(2 * row_tokens)
        at.plain_tokens += len(ids)
        return ids

    def _drill(self, rng: random.Random, num_tokens: int) -> list[int]:
        length = rng.randint(8, num_tokens // 4)
        if rng.random() < 0.5:
            span = rng.choices(range(len(SPECIAL_TOKENS), self._vocab_size), k=length)
        else:
            text = rng.choice(self._texts)
            start = rng.randrange(max(1, len(text) - length))
            span = text[start : start + length]
        return [BOS_ID, *span * (num_tokens // len(span)), END_ID]

    def _next_piece(self, max_tokens: int) -> list[int]:
        at = self.position
        order = list(range(len(self._texts)))
        random.Random(f"{self._seed}:epoch:{at.epoch}").shuffle(order)
        text = self._texts[order[at.module]]
        piece = text[at.offset : at.offset + max_tokens]
        at.offset += len(piece)
        if at.offset >= len(text):
            at.offset = 0
            at.module += 1
            if at.module == len(order):
                at.module = 0
                at.epoch += 1
        return piece
