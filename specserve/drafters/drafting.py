"""What both drafting models share: one forward pass for all new tokens, then the draft steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specserve.core.types import Int32Array
from specserve.drafters.base import Answer, Key, Row
from specserve.drafters.kv_cache import Packed, Span
from specserve.drafters.ops import most_likely
from specserve.drafters.slots import Slot, SlotTable
from specserve.wire.messages import Card

Guess = tuple[tuple[int, ...], tuple[float, ...]]
"""A draft's tokens, and the model's probability of each, given the tokens before it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one call computes for a row.

    Attributes:
        slot: the text's slot; its length ends before the new entries.
        tokens: int32 ``[m]``, tokens of the new entries, at least one.
        num_drafts: tokens to draft after them.
        states: ``[m, hidden_size]``, the target's hidden states; None: the model takes none.
    """

    slot: Slot
    tokens: Int32Array
    num_drafts: int
    states: npt.NDArray[Any] | None = None

    @property
    def span(self) -> Span:
        """Cache positions of the new entries; valid until the slot is extended by them."""
        slot = self.slot
        return Span(slot.index, slot.length, slot.length + len(self.tokens), slot.begin)


class SlotDrafter(ABC):
    """A :class:`~specserve.drafters.base.Drafter` that keeps its texts in slots.

    The slot's length excludes the entries of draft tokens: the text's next row overwrites them.

    Args:
        card: describes the drafter; ``card.max_tokens`` limits each text.
        slots: the texts' slots.
        device: the model's device.
    """

    def __init__(self, card: Card, slots: SlotTable, device: torch.device) -> None:
        self.card = card
        self._slots = slots
        self._device = device

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row]) -> list[Answer]:
        """See :meth:`specserve.drafters.base.Drafter.draft`."""
        turns = [turn for row in rows if (turn := self._prepare(row)) is not None]
        # Longest drafts first, so that each draft step continues the first rows of the batch.
        turns.sort(key=lambda turn: turn.num_drafts, reverse=True)
        drafts = self._compute(turns) if turns else {}
        answers = []
        for row in rows:
            if (slot := self._slots.get(row.key)) is None:
                answers.append(Answer(0))
            else:
                guess = drafts.get(slot.index, ((), ()))
                answers.append(Answer(slot.length, *guess, begin=slot.begin))
        return answers

    def forget(self, keys: Sequence[Key]) -> None:
        """See :meth:`specserve.drafters.base.Drafter.forget`."""
        for key in keys:
            self._slots.close(key)

    @abstractmethod
    def _prepare(self, row: Row) -> Turn | None:
        """Sets the row's slot to where its new entries start; None: there is nothing to compute."""

    @abstractmethod
    def _forward(
        self, tokens: Tensor, states: Tensor | None, packed: Packed, num_wanted: int
    ) -> tuple[Tensor, Tensor]:
        """Computes new entries and writes them into the cache.

        Args:
            tokens: int64 ``[total]``, tokens of the entries.
            states: ``[total, width]``, the target's hidden states or this method's results for the
                previous entries; None: the turns have none.
            packed: the entries' places in the cache.
            num_wanted: number of leading spans whose last entry's result is wanted.

        Returns:
            results ``[num_wanted, width]``, and their logits ``[num_wanted, vocab_size]``.
        """

    def _compute(self, turns: Sequence[Turn]) -> dict[int, Guess]:
        """Drafts by slot index; ``turns`` are sorted by draft length, the longest first."""
        spans = [turn.span for turn in turns]
        tokens = np.concatenate([turn.tokens for turn in turns], dtype=np.int64)
        num_left = sum(turn.num_drafts > 0 for turn in turns)
        results, logits = self._forward(
            torch.from_numpy(tokens).to(self._device),
            self._states(turns),
            Packed.of(spans, self._device),
            num_left,
        )
        for turn in turns:  # only now: other texts may share only computed entries
            self._slots.extend(turn.slot, turn.tokens)
        steps: list[tuple[Tensor, Tensor]] = []
        for step in range(turns[0].num_drafts):
            if step:
                num_left = sum(turn.num_drafts > step for turn in turns)
                packed = Packed.of([span.drafted(step) for span in spans[:num_left]], self._device)
                drafted = steps[-1][0][:num_left]
                results, logits = self._forward(drafted, results[:num_left], packed, num_left)
            steps.append(most_likely(logits))
        tokens_of = [tokens.tolist() for tokens, _ in steps]
        chances_of = [chances.tolist() for _, chances in steps]
        return {
            turn.slot.index: (
                tuple(tokens[row] for tokens in tokens_of[: turn.num_drafts]),
                tuple(chances[row] for chances in chances_of[: turn.num_drafts]),
            )
            for row, turn in enumerate(turns)
        }

    def _states(self, turns: Sequence[Turn]) -> Tensor | None:
        """The target's hidden states of all new entries, ``[total, hidden_size]``; None: none."""
        given = [turn.states for turn in turns if turn.states is not None]
        if not given:
            return None
        assert len(given) == len(turns)
        assert len({each.dtype for each in given}) == 1
        states = np.concatenate(given)
        if states.dtype == np.uint16:
            return torch.from_numpy(states.view(np.int16)).to(self._device).view(torch.bfloat16)
        return torch.from_numpy(states).to(self._device)
