"""The training stream: documents drawn by index from a seed and packed into rows of tokens."""

from __future__ import annotations

import random
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer

from specserve.compare.corpus import Module
from tools.demo_models.tasks import AllTasks
from tools.demo_models.tokenizer import BOS_ID, END_ID, SPECIAL_TOKENS, encode_chat, encode_texts

CHARS_PER_TOKEN = 3
TASK_SHARE = 0.5
"""Share of the tokens that chat tasks get; plain code gets as many."""

DRILL_CHANCE = 0.08
"""Share of the documents that are drills: a span of random tokens or code, twice.

Nothing but attention to what stood before can predict the second. Spans that came again and again
would teach that what came twice goes on for ever: greedy text then ends in loops.
"""


class Rows(Protocol):
    """Where a run's rows come from."""

    def rows(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """The next rows, int64 [num_rows, num_tokens]."""

    def state_dict(self) -> Any:
        """Where it stands, for a checkpoint."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from what `state_dict` gave."""


class Corpus:
    """The training modules, encoded once for all streams, and the tasks made from them."""

    def __init__(self, modules: list[Module], tokenizer: Tokenizer) -> None:
        self.texts = encode_texts(tokenizer, [m.text for m in modules])
        self.tasks = AllTasks(modules)
        self.tokenizer = tokenizer


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

    def __init__(self, corpus: Corpus, *, seed: str) -> None:
        self._corpus = corpus
        self._vocab_size = corpus.tokenizer.get_vocab_size()
        self._seed = seed
        self._order = (-1, [0])
        self.position = Position()

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values."""
        return asdict(self.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.position = Position(**state)

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
            task = self._corpus.tasks.draw(rng, int(limit))
            ids = encode_chat(self._corpus.tokenizer, task)
            at.task_tokens += len(ids)
            return ids
        ids = self._next_piece(2 * row_tokens)
        at.plain_tokens += len(ids)
        return ids

    def _drill(self, rng: random.Random, num_tokens: int) -> list[int]:
        length = rng.randint(num_tokens // 8, num_tokens // 2)
        if rng.random() < 0.5:
            span = rng.choices(range(len(SPECIAL_TOKENS), self._vocab_size), k=length)
        else:
            text = rng.choice(self._corpus.texts)[1:-1]
            start = rng.randrange(max(1, len(text) - length))
            span = text[start : start + length]
        return [BOS_ID, *span, *span, END_ID]

    def _next_piece(self, max_tokens: int) -> list[int]:
        at = self.position
        order = self._order_of(at.epoch)
        text = self._corpus.texts[order[at.module]]
        piece = text[at.offset : at.offset + max_tokens]
        at.offset += len(piece)
        if at.offset >= len(text):
            at.offset = 0
            at.module += 1
            if at.module == len(order):
                at.module = 0
                at.epoch += 1
        return piece

    def _order_of(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self._corpus.texts)))
            random.Random(f"{self._seed}:epoch:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]


Shape = tuple[int, int]


class StreamPool:
    """Streams that take turns, each with its next rows made ahead by a process of the pool.

    For a GPU, which trains faster than one process makes rows.
    """

    def __init__(self, streams: list[TokenStream]) -> None:
        self._streams = streams
        self._turn = 0
        self._ahead: dict[int, tuple[Shape, Future[tuple[torch.Tensor, Position]]]] = {}
        self._pool = ProcessPoolExecutor(
            len(streams), get_context("fork"), initializer=_inherit, initargs=(streams,)
        )

    def rows(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """The next rows of the stream whose turn it is, int64 [num_rows, num_tokens]."""
        turn, shape = self._turn, (num_rows, num_tokens)
        ahead_shape, ahead = self._ahead.get(turn) or self._start(turn, shape)
        if ahead_shape != shape:
            ahead = self._start(turn, shape)[1]
        rows, self._streams[turn].position = ahead.result()
        self._ahead[turn] = self._start(turn, shape)
        self._turn = (turn + 1) % len(self._streams)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Positions after the rows handed out, and whose turn it is."""
        return {"turn": self._turn, "streams": [s.state_dict() for s in self._streams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave; rows made ahead are dropped."""
        self._ahead.clear()
        self._turn = state["turn"]
        for stream, position in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(position)

    def _start(
        self, turn: int, shape: Shape
    ) -> tuple[Shape, Future[tuple[torch.Tensor, Position]]]:
        return shape, self._pool.submit(_rows_after, turn, self._streams[turn].position, shape)


_inherited: list[TokenStream] = []
"""In a process of a StreamPool: its streams, as they were when the process was forked."""


def _inherit(streams: list[TokenStream]) -> None:
    _inherited[:] = streams


def _rows_after(turn: int, position: Position, shape: Shape) -> tuple[torch.Tensor, Position]:
    stream = _inherited[turn]
    stream.position = position
    return stream.rows(*shape), stream.position
