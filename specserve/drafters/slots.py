"""Which text stands in which slot of a drafter's KV cache, and what of it counts.

A slot is a row of the cache with a text of its own. Rolling back is moving a length. A text that
has ended stays in its slot until another needs it: a new text that begins like it takes over what
they share.
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
"""A text that was used so short a time ago keeps its slot. Were it dropped for a new one, more
texts than there are slots would drop one another at each step, and all would be read again and
again. Those that are being read take turns, and may be unused for a while."""


@dataclass(slots=True)
class Slot:
    """A slot and its text.

    Attributes:
        index: row of the KV cache.
        key: whose text it is; None: nobody's any more, or none yet.
        salt: only texts of the same salt may share it.
        length: entries of the cache that count are ``begin .. length - 1``.
        begin: first entry that was ever computed; later than 0 where the beginning was missing.
        used_at: monotonic time of the last call that was about its text.
    """

    index: int
    key: Key | None = None
    salt: int = 0
    length: int = 0
    begin: int = 0
    used_at: float = -math.inf


_HEAD_TOKENS = 16
"""A beginning of fewer tokens is read as soon as it is copied from another text."""


class SlotTable:
    """Places for texts; the one that was used longest ago goes first.

    Args:
        num_slots: rows of the KV cache.
        max_tokens: length of each, in tokens.
        copy: called with two rows and a length: copies so many first entries from one to the other.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        copy: Callable[[int, int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokens = np.zeros((num_slots, max_tokens), np.int32)
        """int32 ``[num_slots, max_tokens]``, the texts; of each slot the first ``length`` count."""
        self._slots = [Slot(index) for index in range(num_slots)]
        self._by_key: dict[Key, Slot] = {}
        self._copy = copy
        self._clock = clock
        self._was_full = False

    def get(self, key: Key) -> Slot | None:
        """A text's slot, now the youngest; None: it has none."""
        slot = self._by_key.get(key)
        if slot is not None:
            slot.used_at = self._clock()
        return slot

    def open(self, key: Key, salt: int) -> Slot | None:
        """A slot for a new text: the oldest one that is nobody's or, if there is none, anybody's
        that was not used for ``KEEP_S`` seconds.

        Args:
            key: the text's name; it has no slot.
            salt: of the text.

        Returns:
            None: all slots are kept.
        """
        assert key not in self._by_key
        now = self._clock()
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
        if slot.salt != salt or slot.begin:  # nothing there is a beginning of this salt's texts
            slot.length = slot.begin = 0
        slot.key, slot.salt, slot.used_at = key, salt, now
        self._by_key[key] = slot
        return slot

    def restart(self, slot: Slot, text: Int32Array) -> None:
        """Empties a slot for a text, but for the longest beginning that some slot holds of it.

        Args:
            slot: of a text that begins at 0.
            text: int32 ``[n]``, from the text's first token on.
        """
        head = text[:_HEAD_TOKENS]
        alike = np.flatnonzero((self.tokens[:, : len(head)] == head).all(axis=1))
        others = [self._slots[index] for index in alike]
        # Itself first: where others hold no more, nothing is to be copied.
        candidates = [slot, *(o for o in others if o.salt == slot.salt and not o.begin)]
        lengths = [self.num_held(each, text) for each in candidates]
        length = max(lengths)
        source = candidates[lengths.index(length)]
        if source is not slot:
            self._copy(source.index, slot.index, length)
            self.tokens[slot.index, :length] = text[:length]
        slot.length = length

    def extend(self, slot: Slot, tokens: Int32Array) -> None:
        """Says that the entries of these next tokens have been computed."""
        end = slot.length + len(tokens)
        self.tokens[slot.index, slot.length : end] = tokens
        slot.length = end

    def close(self, key: Key) -> None:
        """A text has ended: its slot may be taken, and until then be shared from."""
        slot = self._by_key.pop(key, None)
        if slot is not None:
            slot.key = None

    def num_held(self, slot: Slot, tokens: Int32Array, start: int = 0) -> int:
        """How many of these tokens, the first of which is at ``start``, a slot holds there."""
        held = self.tokens[slot.index, start : slot.length][: len(tokens)]
        differs = held != tokens[: len(held)]
        return int(differs.argmax()) if differs.any() else len(held)
