"""The draft model: a smaller model with the target's vocabulary that drafts greedily."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from specserve.drafters.base import Row
from specserve.drafters.causal_model import CausalModel
from specserve.drafters.drafting import SlotDrafter, Turn
from specserve.drafters.kv_cache import KVCache, Packed
from specserve.drafters.slots import Slot, SlotTable
from specserve.drafters.vocabulary import fingerprint
from specserve.wire.messages import Card


class CausalDrafter(SlotDrafter):
    """Drafts with a causal language model, and caches the keys and values of the texts.

    Each cache entry belongs to one token, so ``Answer.held`` counts tokens.

    Args:
        model: the draft model.
        card: describes the drafter.
        max_texts: texts that the KV cache holds.

    Raises:
        ConfigError: the KV cache does not fit into memory.
    """

    def __init__(self, model: CausalModel, card: Card, max_texts: int) -> None:
        self._model = model
        self._cache = KVCache(model.layers, max_texts, card.max_tokens, model.dtype, model.device)
        slots = SlotTable(max_texts, card.max_tokens, self._cache.copy)
        super().__init__(card, slots, model.device)

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
        """Loads a draft model; the arguments are as in
        :class:`~specserve.drafters.options.DrafterOptions`.

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

    def _prepare(self, row: Row) -> Turn | None:
        slot = self._place(row)
        room = self.card.max_tokens - row.num_tokens
        if slot is None or row.start > slot.length or room < 0:
            return None
        num_drafts = min(row.max_draft_tokens, room)
        tokens = row.tokens[slot.length - row.start :]
        if num_drafts and not len(tokens) and slot.length:
            # A draft needs the last token's logits. They were not kept, so it is computed again.
            slot.length -= 1
            tokens = self._slots.tokens[slot.index, slot.length : slot.length + 1].copy()
        if len(tokens) > row.max_feed_tokens:
            tokens, num_drafts = tokens[: row.max_feed_tokens], 0
        if not len(tokens):
            return None
        return Turn(slot, tokens, num_drafts)

    def _place(self, row: Row) -> Slot | None:
        """The slot of a row's text, its length set to what it holds of the row; None: no slot."""
        slot = self._slots.get(row.key)
        if row.start == 0 and row.num_tokens <= self.card.max_tokens:
            slot = slot or self._slots.open(row.key, row.salt)
            if slot is not None:
                self._slots.restart(slot, row.tokens)
        elif slot is not None and row.start <= slot.length:
            # The slot may hold some of these tokens: an earlier answer may have been lost.
            slot.length = row.start + self._slots.num_held(slot, row.tokens, row.start)
        return slot

    def _forward(
        self, tokens: Tensor, states: Tensor | None, packed: Packed, num_wanted: int
    ) -> tuple[Tensor, Tensor]:
        logits = self._model.forward(tokens, self._cache, packed, num_wanted)
        return logits, logits
