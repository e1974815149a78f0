"""A fake drafter. Its drafts depend on the whole text, so that one wrong token is noticed."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from specserve.core.types import Int32Array
from specserve.drafters.base import Answer, Key, Row
from specserve.wire.messages import Card

VOCAB_SIZE = 1000
WAIT_S = 20.0


def draft_of(text: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """The fake's draft after ``text``."""
    text = list(text)
    for _ in range(num_tokens):
        text.append(crc32(np.array(text, np.int32).tobytes()) % VOCAB_SIZE)
    return tuple(text[len(text) - num_tokens :])


def states_of(text: Int32Array, hidden_size: int) -> npt.NDArray[np.uint16]:
    """The hidden states of a text; each depends on its position and token."""
    values = (np.arange(len(text)) * 31 + text * 7) % 65536
    return np.repeat(values.astype(np.uint16)[:, None], hidden_size, axis=1)


class FakeDrafter:
    """Holds texts as real drafters do; with ``hidden_size`` it checks states, as the MTP drafter.

    Attributes:
        calls: the rows of each call so far.
        forgotten: all keys passed to :meth:`forget`.
        begins: first position with a state, of texts whose first states are missing.
        entered: set whenever a call begins.
        may_go: a call waits for this event.
        meanwhile: called repeatedly while a call waits.
        error: raised by each call, if set.
        chances: probabilities of the draft tokens.
        room: number of texts that it can hold.
        most_rows: a call with more rows raises.
        poison: numbers of texts whose calls raise.
        complaint: failed assertion of a call; the server treats it as an error of the model.
    """

    def __init__(self, hidden_size: int = 0, tokenizer: str = "") -> None:
        kind = "mtp" if hidden_size else "draft_model"
        self.card = Card(
            kind=kind,
            model="/models/fake",
            vocab_size=VOCAB_SIZE,
            tokenizer=tokenizer,
            hidden_size=hidden_size,
            max_tokens=1 << 20,
        )
        self.calls: list[list[Row]] = []
        self.forgotten: list[Key] = []
        self.begins: dict[Key, int] = {}
        self.entered = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()
        self.meanwhile: Callable[[], None] = lambda: None
        self.error: Exception | None = None
        self.chances: tuple[float, ...] = (1.0,) * 128
        self.room = self.most_rows = 1 << 20
        self.poison: set[int] = set()
        self.complaint: AssertionError | None = None
        self._activations: weakref.ref[Any] = weakref.ref(type("Gone", (), {})())
        self._texts: dict[Key, list[int]] = {}
        self._held: dict[Key, int] = {}

    def draft(self, rows: Sequence[Row]) -> list[Answer]:
        try:
            return self._answers(rows)
        except AssertionError as error:
            self.complaint = error
            raise

    def assert_called_rightly(self) -> None:
        """Raises the failed assertion of a call; to be called after all calls."""
        assert self.complaint is None, self.complaint

    def _answers(self, rows: Sequence[Row]) -> list[Answer]:
        assert len({row.key for row in rows}) == len(rows)
        self.calls.append(list(rows))
        self.entered.set()
        deadline = time.monotonic() + WAIT_S
        while not self.may_go.wait(0.005):
            assert time.monotonic() < deadline
            self.meanwhile()
        if self.error is not None:
            raise self.error
        assert self._activations() is None, "arrays of a failed call are still alive"
        activations = np.zeros(len(rows))
        self._activations = weakref.ref(activations)
        if len(activations) > self.most_rows:
            raise MemoryError(f"{len(rows)} rows")
        if poisoned := self.poison & {row.key[1] for row in rows}:
            raise MemoryError(f"texts {poisoned}")
        return [self._draft(row) for row in rows]

    def forget(self, keys: Sequence[Key]) -> None:
        self.forgotten.extend(keys)
        for key in keys:
            self._texts.pop(key, None)
            self._held.pop(key, None)

    def lose(self) -> None:
        """Forgets all texts, as a drafter without room does."""
        self._texts.clear()
        self._held.clear()

    def _draft(self, row: Row) -> Answer:
        held = self._held.get(row.key, 0)
        is_full = row.key not in self._texts and len(self._texts) >= self.room
        if row.start > held or is_full:
            return Answer(held)
        text = self._texts.setdefault(row.key, [])
        text[row.start :] = row.tokens.tolist()
        held = self._hold(row, held, text)
        self._held[row.key] = held
        is_whole = held == len(text) - (self.card.hidden_size > 0)
        tokens = draft_of(text, row.max_draft_tokens) if is_whole else ()
        return Answer(held, tokens, self.chances[: len(tokens)], self.begins.get(row.key, 0))

    def _hold(self, row: Row, held: int, text: list[int]) -> int:
        if not self.card.hidden_size:
            return min(len(text), row.start + row.max_feed_tokens)
        held = min(held, len(text) - 1)
        if row.states is None:
            return held
        end = row.states_start + len(row.states)
        expected = states_of(np.array(text[:end], np.int32), self.card.hidden_size)
        assert np.array_equal(
            row.states[: len(text) - row.states_start], expected[row.states_start :]
        )
        if row.states_start > held:
            self.begins[row.key] = row.states_start
        end = min(end, max(held, row.states_start) + row.max_feed_tokens)
        return min(max(held, end), len(text) - 1)
