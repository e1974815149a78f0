"""The training stream: draws documents by seed and index, and packs them into rows of tokens."""

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
"""Share of chat tasks in the tokens of tasks and plain code."""

DRILL_CHANCE = 0.08
"""Share of the documents that are drills: a span of random tokens or of code, repeated once.

Only copying from the context can predict the repeated span. More than one repetition would teach
endless repetition, so that greedy text ends in loops.
"""


class Rows(Protocol):
    """A source of training rows."""

    def rows(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """The next rows, int64 [num_rows, num_tokens]."""

    def state_dict(self) -> Any:
        """The current position, for a checkpoint."""

    def load_state_dict(self, state: Any) -> None:
        """Continues from a position that `state_dict` returned."""


class Corpus:
    """The encoded training modules and the chat tasks on them, shared by all streams."""

    def __init__(self, modules: list[Module], tokenizer: Tokenizer) -> None:
        self.texts = encode_texts(tokenizer, [m.text for m in modules])
        self.tasks = AllTasks(modules)
        self.tokenizer = tokenizer


@dataclass
class Position:
    """The position of a stream. With the seed it determines all further rows."""

    plain_tokens: int = 0
    task_tokens: int = 0
    document: int = 0
    epoch: int = 0
    module: int = 0
    offset: int = 0
    rest: list[int] = field(default_factory=list)
    """Tokens that were drawn but are not yet in a row."""


class TokenStream:
    """An endless, seeded sequence of packed rows. Equal seeds and positions give equal rows.

    Plain modules come in pieces, in a new random order each epoch.
    """

    def __init__(self, corpus: Corpus, *, seed: str) -> None:
        self._corpus = corpus
        self._vocab_size = corpus.tokenizer.get_vocab_size()
        self._seed = seed
        self._order = (-1, [0])
        self.position = Position()

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values."""
        return asdict(self.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a position that `state_dict` returned."""
        self.position = Position(**state)

    def rows(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """The next rows, int64 [num_rows, num_tokens]; a document may span several rows."""
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
    """Streams used in rotation; pool processes prepare the next rows of each stream.

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
        """The positions after the returned rows, and the index of the next stream."""
        return {"turn": self._turn, "streams": [s.state_dict() for s in self._streams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that `state_dict` returned; drops prepared rows."""
        self._ahead.clear()
        self._turn = state["turn"]
        for stream, position in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(position)

    def _start(
        self, turn: int, shape: Shape
    ) -> tuple[Shape, Future[tuple[torch.Tensor, Position]]]:
        return shape, self._pool.submit(_rows_after, turn, self._streams[turn].position, shape)


_inherited: list[TokenStream] = []
"""In a pool process: the StreamPool's streams at the time of the fork."""


def _inherit(streams: list[TokenStream]) -> None:
    _inherited[:] = streams


def _rows_after(turn: int, position: Position, shape: Shape) -> tuple[torch.Tensor, Position]:
    stream = _inherited[turn]
    stream.position = position
    return stream.rows(*shape), stream.position
