"""The draft model: a smaller model with the target's vocabulary writes on, greedily."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from specserve.core.types import Int32Array
from specserve.drafters.base import Answer, Card, Key, Row
from specserve.drafters.causal_model import CausalModel
from specserve.drafters.kv_cache import KVCache, Span
from specserve.drafters.ops import Guess, guesses, likeliest
from specserve.drafters.slots import Slot, SlotTable
from specserve.drafters.vocabulary import fingerprint


@dataclass(frozen=True, slots=True)
class _Turn:
    """A row's part of a call.

    Attributes:
        row: its index in the call.
        slot: its text's, up to before the new tokens.
        tokens: int32 ``[m]``, the new tokens, at least one.
        draft_len: tokens to draft after them.
    """

    row: int
    slot: Slot
    tokens: Int32Array
    draft_len: int

    @property
    def end(self) -> int:
        """Length of the whole text."""
        return self.slot.length + len(self.tokens)


class CausalDrafter:
    """Drafts with a causal language model; keeps the keys and values of the texts.

    A draft's own entries are written behind the text and count for nothing: the next call
    overwrites them.

    Args:
        model: the draft model.
        card: what to tell of it; texts are ``card.max_tokens`` long at most.
        max_texts: texts to remember.

    Attributes:
        card: what it tells of itself.

    Raises:
        ConfigError: so many texts do not fit into memory.
    """

    def __init__(self, model: CausalModel, card: Card, max_texts: int) -> None:
        self._model = model
        self.card = card
        self._cache = KVCache(model.layers, max_texts, card.max_tokens, model.dtype, model.device)
        self._slots = SlotTable(max_texts, card.max_tokens, self._cache.copy)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        max_texts: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        revision: str = "",
    ) -> Self:
        """Loads a draft model.

        Args:
            model: folder of a Hugging Face checkpoint, or its id on the hub.
            max_texts: texts to remember.
            max_tokens: longest text; the model's own limit holds as well.
            dtype: to compute in.
            device: as torch names it.
            revision: on the hub: branch, tag or commit; empty: the default one.

        Raises:
            ConfigError: the checkpoint is missing or no model of plain causal attention, or the KV
                cache does not fit into memory.
        """
        loaded = CausalModel.load(model, dtype, torch.device(device), revision)
        card = Card(
            kind="draft_model",
            model=model,
            vocab_size=loaded.vocab_size,
            tokenizer=fingerprint(model, revision),
            hidden_size=0,
            max_tokens=min(max_tokens, loaded.max_positions),
        )
        return cls(loaded, card, max_texts)

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row]) -> list[Answer]:
        """See :class:`~specserve.drafters.base.Drafter`; ``held`` counts whole texts."""
        keys = {row.key for row in rows}
        slots = [self._place(row, keys) for row in rows]
        answers = [Answer(slot.length if slot else 0) for slot in slots]
        turns = []
        for index, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            turn = self._turn(index, row, slot) if slot else None
            if turn is not None:
                turns.append(turn)
        # The rows that go on drafting are always the first ones.
        turns.sort(key=lambda turn: turn.draft_len, reverse=True)
        for turn, guess in zip(turns, self._run(turns), strict=True):
            self._slots.extend(turn.slot, turn.tokens)  # not sooner: none may share it uncomputed
            answers[turn.row] = Answer(turn.slot.length, *guess)
        return answers

    def forget(self, keys: Sequence[Key]) -> None:
        """These texts have ended; unknown keys are fine."""
        for key in keys:
            self._slots.close(key)

    def _place(self, row: Row, keys: Collection[Key]) -> Slot | None:
        """The slot of a row's text, which it holds up to the row's start or further; None: none."""
        slot = self._slots.get(row.key)
        if row.start == 0 and row.num_tokens <= self.card.max_tokens:
            slot = slot or self._slots.open(row.key, row.salt, keys)
            if slot is not None:
                self._slots.restart(slot, row.tokens)
        elif slot is not None and row.start <= slot.length:
            # What stands there already may be more than was asked for: its answer was lost.
            slot.length = row.start + self._slots.num_held(slot, row.tokens, row.start)
        return slot

    def _turn(self, index: int, row: Row, slot: Slot) -> _Turn | None:
        """What is to be computed for a row; None: nothing."""
        room = self.card.max_tokens - row.num_tokens
        if row.start > slot.length or room < 0:
            return None
        draft_len = min(row.max_draft_tokens, room)
        if draft_len and slot.length == row.num_tokens > 0:
            # A draft needs the last token's logits, which are not kept.
            slot.length -= 1
            last = self._slots.tokens[slot.index, slot.length : slot.length + 1].copy()
            return _Turn(index, slot, last, draft_len)
        missing = row.tokens[slot.length - row.start :]
        tokens = missing[: row.max_feed_tokens]
        if len(tokens) < len(missing):
            draft_len = 0
        return _Turn(index, slot, tokens, draft_len) if len(tokens) else None

    def _run(self, turns: Sequence[_Turn]) -> list[Guess]:
        """Computes the turns, longest draft first; their drafts."""
        if not turns:
            return []
        ids = torch.as_tensor(
            np.concatenate([turn.tokens for turn in turns], dtype=np.int64),
            device=self._model.device,
        )
        spans = [Span(turn.slot.index, turn.slot.length, turn.end) for turn in turns]
        steps = [self._next(ids, spans, _num_drafting(turns, 0))]
        for step in range(1, turns[0].draft_len):
            num_left = _num_drafting(turns, step)
            drafted = [span.drafted(step) for span in spans[:num_left]]
            steps.append(self._next(steps[-1][0][:num_left], drafted, num_left))
        return guesses(steps, len(turns))

    def _next(self, ids: Tensor, spans: Sequence[Span], num_wanted: int) -> tuple[Tensor, Tensor]:
        """Computes new tokens; see :func:`likeliest`, of what follows the first spans."""
        return likeliest(self._model.forward(ids, self._cache, spans, num_wanted))


def _num_drafting(turns: Sequence[_Turn], step: int) -> int:
    """How many of the turns want a token more after ``step`` drafted ones."""
    return sum(turn.draft_len > step for turn in turns)
