"""A drafter that runs the target's multi-token prediction module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import DeepseekV3Config

from specserve.core.errors import ConfigError, reason_of
from specserve.drafters.base import Row
from specserve.drafters.drafting import Guess, SlotDrafter, Turn
from specserve.drafters.kv_cache import Packed
from specserve.drafters.mtp_files import fetch_mtp, find_mtp
from specserve.drafters.mtp_kernels import MAX_ENTRIES, MtpKernels
from specserve.drafters.mtp_module import MtpModule
from specserve.drafters.mtp_packing import kernels_of
from specserve.drafters.mtp_weights import MtpWeights
from specserve.drafters.slots import Slot, SlotTable
from specserve.drafters.vocabulary import fingerprint
from specserve.wire.messages import Card

_CONFIG = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "rope_interleave": True,
}
"""Values of config.json that the implementation requires and that the tensors do not show."""

_EXPERT_STEP = 8
"""Experts' widths are multiples of this: rows start at multiples of 16 bytes, 8 bfloat16 values."""


class MtpDrafter(SlotDrafter):
    """Drafts from the target's own hidden states.

    A text of n tokens has n - 1 cache entries: entry i needs the target's hidden state of position
    i and token i + 1. ``Answer.held`` counts entries. If hidden states are missing, the entries
    begin after the gap, and drafts are based on these entries alone.

    Args:
        module: the model, with ``max_texts`` slots.
        card: describes the drafter.
        max_texts: texts that the cache holds.
        kernels: computes calls with few new entries; None: the module computes all.
    """

    def __init__(
        self, module: MtpModule, card: Card, max_texts: int, kernels: MtpKernels | None = None
    ) -> None:
        self.module = module
        self.kernels = kernels
        slots = SlotTable(max_texts, card.max_tokens, module.attention.copy)
        super().__init__(card, slots, module.device)

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
        """Loads the module from its target's checkpoint or from a folder of its own.

        The arguments are as in :class:`~specserve.drafters.options.DrafterOptions`.

        Raises:
            ConfigError: the model is missing, its MTP module is missing or differs from
                DeepSeek-V3's, or the cache does not fit into memory.
        """
        folder = model if Path(model).is_dir() else fetch_mtp(model, revision)
        files = find_mtp(folder, "model")
        config = _read_config(folder, files.config)
        weights = MtpWeights(files, dtype, torch.device(device))
        card = Card(
            kind="mtp",
            model=model,
            vocab_size=config.vocab_size,
            tokenizer=fingerprint(model, revision),
            hidden_size=config.hidden_size,
            max_tokens=min(max_tokens, config.max_position_embeddings),
        )
        module = MtpModule(config, weights, max_texts, card.max_tokens)
        return cls(module, card, max_texts, kernels_of(config, weights, module.attention))

    def _prepare(self, row: Row) -> Turn | None:
        if not 0 < row.num_tokens <= self.card.max_tokens:
            return None
        slot = self._place(row) if row.start == 0 else self._resume(row)
        if slot is None or row.states is None:
            return None
        num_entries = row.num_tokens - 1
        begin = max(row.states_start, slot.length)
        states_end = row.states_start + len(row.states)
        end = min(num_entries, states_end, begin + row.max_feed_tokens)
        if row.states_start >= end:
            return None  # all these states lie behind the entries that can be computed
        num_drafts = 0
        if end == num_entries:
            num_drafts = min(row.max_draft_tokens, self.card.max_tokens - row.num_tokens)
        if num_drafts > 0:
            # The first draft token needs the last entry's result. If held, it is computed again.
            self._truncate(slot, end - 1)
        if row.states_start > slot.length:
            slot.begin = slot.length = row.states_start
        start = slot.length
        if start >= end:
            return None
        tokens = row.tokens[start + 1 - row.start : end + 1 - row.start]
        states = row.states[start - row.states_start : end - row.states_start]
        return Turn(slot, tokens, num_drafts, states)

    def _place(self, row: Row) -> Slot | None:
        """A slot for a text sent from its beginning, with the prefix that any slot holds of it."""
        self._slots.close(row.key)
        # Entry i holds token i + 1, so the table never sees token 0. It goes into the salt.
        salt = row.salt * 2**31 + int(row.tokens[0])
        slot = self._slots.open(row.key, salt)
        if slot is not None:
            self._slots.restart(slot, row.tokens[1:])
        return slot

    def _resume(self, row: Row) -> Slot | None:
        """The slot of a text that continues at ``row.start``; None: it holds less."""
        slot = self._slots.get(row.key)
        if slot is None or row.start > slot.length:
            return None
        kept = row.start
        # Entry start - 1 contains the token at start, which may have changed.
        last = self._slots.tokens[slot.index, kept - 1]
        if kept > slot.begin and (not len(row.tokens) or last != row.tokens[0]):
            kept -= 1
        self._truncate(slot, kept)
        return slot

    def _truncate(self, slot: Slot, length: int) -> None:
        slot.length = min(slot.length, length)
        slot.begin = min(slot.begin, slot.length)

    def _compute(self, turns: Sequence[Turn]) -> dict[int, Guess]:
        num_entries = sum(len(turn.tokens) for turn in turns)
        if self.kernels is None or num_entries > MAX_ENTRIES:
            return super()._compute(turns)
        states = self._states(turns)
        assert states is not None
        drafted, chances = self.kernels.draft(
            np.array([astuple(turn.span) for turn in turns]),
            np.array([turn.num_drafts for turn in turns]),
            np.concatenate([turn.tokens for turn in turns], dtype=np.int32),
            states.float().numpy(),
        )
        drafts = {}
        for row, turn in enumerate(turns):
            self._slots.extend(turn.slot, turn.tokens)
            num = turn.num_drafts
            guess = tuple(drafted[row, :num].tolist()), tuple(chances[row, :num].tolist())
            drafts[turn.slot.index] = guess
        return drafts

    def _forward(
        self, tokens: Tensor, states: Tensor | None, packed: Packed, num_wanted: int
    ) -> tuple[Tensor, Tensor]:
        assert states is not None
        results = self.module.forward(states.to(self.module.dtype), tokens, packed, num_wanted)
        return results, self.module.logits(results)


def _read_config(folder: str, raw: dict[str, Any]) -> Any:
    """The checkpoint's config, read by transformers, which converts older forms."""
    for name, allowed in _CONFIG.items():
        if raw.get(name, allowed) != allowed:
            raise ConfigError(f"model: {name}", raw[name], str(allowed))
    try:
        config = DeepseekV3Config.from_pretrained(folder)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise ConfigError("model", folder, f"a valid config.json: {reason_of(error)}") from None
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(config, name) % _EXPERT_STEP:
            raise ConfigError(
                f"model: {name}", getattr(config, name), f"a multiple of {_EXPERT_STEP}"
            )
    kind = config.rope_parameters["rope_type"]
    if kind not in ("default", "yarn"):
        raise ConfigError("model: rope_type", kind, "default, yarn")
    return config
