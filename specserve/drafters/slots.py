"""Assigns texts to the slots of a drafter's KV cache, and tracks which entries are valid.

A slot is a row of the cache and holds one text. Rolling back only shortens a length. A text that
has ended stays in its slot until another text needs the slot. A new text with the same prefix
reuses the entries of that prefix.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specserve.core.types import Int32Array
from specserve.drafters.base import Key

logger = logging.getLogger(__name__)

KEEP_S = 30.0
"""Seconds after its last use during which a text keeps its slot. Without it, more texts than slots
would evict one another at each step and be computed again and again. It is this long because texts
in prefill take turns, and may be unused for a while."""


@dataclass(slots=True)
class Slot:
    """A slot and its text.

    Attributes:
        index: row of the KV cache.
        key: identifies the text; None: the text has ended, or there is none yet.
        salt: only texts with the same salt may share entries.
        length: end of the valid entries, ``begin .. length - 1``.
        begin: first entry that was computed; above 0 if the text's beginning was missing.
        used_at: monotonic time in seconds of the text's last use.
    """

    index: int
    key: Key | None = None
    salt: int = 0
    length: int = 0
    begin: int = 0
    used_at: float = -math.inf


_HEAD_TOKENS = 16
"""Shortest prefix worth copying from another text; a shorter one is computed as quickly."""


class SlotTable:
    """Assigns slots to texts; the least recently used text is evicted first.

    Args:
        num_slots: rows of the KV cache.
        max_tokens: length of each row, in tokens.
        copy: ``copy(source, target, length)`` copies a row's first ``length`` entries to another.
    """

    def __init__(
        self, num_slots: int, max_tokens: int, copy: Callable[[int, int, int], None]
    ) -> None:
        self.tokens = np.zeros((num_slots, max_tokens), np.int32)
        """int32 ``[num_slots, max_tokens]``, the texts; each slot's first ``length`` are valid."""
        self._slots = [Slot(index) for index in range(num_slots)]
        self._by_key: dict[Key, Slot] = {}
        self._copy = copy
        self._was_full = False

    def get(self, key: Key) -> Slot | None:
        """A text's slot, marked as just used; None: it has none."""
        slot = self._by_key.get(key)
        if slot is not None:
            slot.used_at = time.monotonic()
        return slot

    def open(self, key: Key, salt: int) -> Slot | None:
        """Assigns the least recently used free slot to a new text. If none is free, it evicts the
        least recently used text, provided that it was unused for ``KEEP_S`` seconds.

        Args:
            key: identifies the text, which must not have a slot.
            salt: the text's salt.

        Returns:
            None: no slot is available.
        """
        assert key not in self._by_key
        now = time.monotonic()
        free = [slot for slot in self._slots if slot.key is None] or [
            slot for slot in self._slots if slot.used_at <= now - KEEP_S
        ]
        if not free:
            if not self._was_full:
                self._was_full = True
                logger.warning(
                    "All %d texts (max_texts) are in use: further ones get no drafts meanwhile",
                    len(self._slots),
                )
            return None
        slot = min(free, key=lambda slot: slot.used_at)
        if slot.key is not None:
            del self._by_key[slot.key]
        if slot.salt != salt or slot.begin:  # its entries cannot be shared
            slot.length = slot.begin = 0
        slot.key, slot.salt, slot.used_at = key, salt, now
        self._by_key[key] = slot
        return slot

    def restart(self, slot: Slot, text: Int32Array) -> None:
        """Sets a slot to a text, keeping or copying the longest prefix that any slot holds of it.

        Args:
            slot: the text's slot; ``begin`` is 0.
            text: int32 ``[n]``, tokens of the entries from 0 on.
        """
        head = text[:_HEAD_TOKENS]
        alike = np.flatnonzero((self.tokens[:, : len(head)] == head).all(axis=1))
        others = [self._slots[index] for index in alike]
        # The slot itself comes first: nothing is copied unless another one holds more.
        candidates = [slot, *(o for o in others if o.salt == slot.salt and not o.begin)]
        lengths = [self.num_held(each, text) for each in candidates]
        length = max(lengths)
        source = candidates[lengths.index(length)]
        if source is not slot:
            self._copy(source.index, slot.index, length)
            self.tokens[slot.index, :length] = text[:length]
        slot.length = length

    def extend(self, slot: Slot, tokens: Int32Array) -> None:
        """Extends a slot by tokens whose entries have been computed."""
        end = slot.length + len(tokens)
        self.tokens[slot.index, slot.length : end] = tokens
        slot.length = end

    def close(self, key: Key) -> None:
        """Frees an ended text's slot; until it is reassigned, new texts may share its entries."""
        slot = self._by_key.pop(key, None)
        if slot is not None:
            slot.key = None

    def num_held(self, slot: Slot, tokens: Int32Array, start: int = 0) -> int:
        """How many leading ``tokens`` equal those that the slot holds from ``start`` on."""
        held = self.tokens[slot.index, start : slot.length][: len(tokens)]
        differs = held != tokens[: len(held)]
        return int(differs.argmax()) if differs.any() else len(held)
