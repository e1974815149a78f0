"""Which text stands in which slot of a drafter's KV cache, and what of it counts.

A slot is a row of the cache with a text of its own. Rolling back is moving a length. A text that
has ended stays in its slot until another needs it: a new text that begins like it takes over what
they share, found by chained hashes of blocks of tokens as vLLM's prefix cache does.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from specserve.core.types import Int32Array
from specserve.drafters.base import Key

logger = logging.getLogger(__name__)

KEEP_S = 30.0
"""A text that was used so short a time ago keeps its slot. Were it dropped for a new one, more
texts than there are slots would drop one another at each step, and all would be read again and
again. Those that are being read take turns, and may be unused for a while."""

BLOCK = 16
"""Tokens of a block: texts share whole blocks."""


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


@dataclass(frozen=True, slots=True)
class Shared:
    """A common beginning.

    Attributes:
        slot: row of the cache to copy from; may be the text's own new one, then nothing is to be
            copied.
        length: how many entries.
    """

    slot: int
    length: int


class SlotTable:
    """Places for texts; the one that was used longest ago goes first.

    Args:
        num_slots: rows of the KV cache.
        max_tokens: length of each, in tokens.
        clock: monotonic seconds.
    """

    def __init__(
        self, num_slots: int, max_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_tokens = max_tokens
        self.tokens = np.zeros((num_slots, max_tokens), np.int32)
        """int32 ``[num_slots, max_tokens]``, the texts; of each slot the first ``length`` count."""
        self._slots = [Slot(index) for index in range(num_slots)]
        self._by_key: dict[Key, Slot] = {}
        self._by_age: OrderedDict[int, Slot] = OrderedDict((s.index, s) for s in self._slots)
        self._holders: dict[int, dict[int, None]] = {}  # hash of a beginning -> slots, by age
        self._hashes: list[list[int]] = [[] for _ in self._slots]
        self._clock = clock
        self._was_full = False

    def get(self, key: Key) -> Slot | None:
        """A text's slot, now the youngest; None: it has none."""
        slot = self._by_key.get(key)
        if slot is not None:
            self._touch(slot)
        return slot

    def open(self, key: Key, salt: int, keep: Collection[Key] = ()) -> Slot | None:
        """A slot for a new text: the oldest one that is nobody's or, if there is none, anybody's
        that was not used for ``KEEP_S`` seconds.

        Args:
            key: the text's name; it has no slot.
            salt: of the text.
            keep: texts that must not lose their slots.

        Returns:
            None: all slots are kept.
        """
        assert key not in self._by_key
        latest = self._clock() - KEEP_S
        free = (slot for slot in self._by_age.values() if slot.key is None)
        unused = (
            slot
            for slot in self._by_age.values()
            if slot.used_at <= latest and slot.key not in keep
        )
        slot = next(free, None) or next(unused, None)
        if slot is None:
            if not self._was_full:
                self._was_full = True
                logger.warning(
                    "All %d texts (max_texts) are in use: further ones get no drafts meanwhile",
                    len(self._slots),
                )
            return None
        if slot.key is not None:
            del self._by_key[slot.key]
        if slot.salt != salt:  # what stands there was never this salt's
            self.truncate(slot, 0)
        slot.key, slot.salt = key, salt
        self._by_key[key] = slot
        self._touch(slot)
        return slot

    def restart(self, slot: Slot, text: Int32Array) -> Shared:
        """Empties a slot for a text, but for the longest beginning that some slot holds of it.

        Args:
            slot: of :meth:`open`; its length and begin are set, its tokens written up to there.
            text: int32 ``[n]``, from the text's first token on.

        Returns:
            What the caller must copy in the cache before it computes the rest: entries
            ``0 .. length - 1``.
        """
        shared = Shared(slot.index, 0)
        for number, found in enumerate(_chain(slot.salt, text)):
            if found not in self._holders:
                break
            end = (number + 1) * BLOCK
            shared = Shared(self._best_holder(found, slot.index), end)
        if not self._holds(shared.slot, slot.salt, text[: shared.length]):
            shared = Shared(slot.index, 0)
        self._drop_blocks(slot.index, 0)
        slot.begin, slot.length = 0, shared.length
        self.tokens[slot.index, : shared.length] = text[: shared.length]
        return shared

    def truncate(self, slot: Slot, length: int) -> None:
        """Rolls a text back to its first ``length`` tokens."""
        slot.length = min(slot.length, length)
        self._drop_blocks(slot.index, slot.length // BLOCK)

    def extend(self, slot: Slot, tokens: Int32Array) -> None:
        """Says that the entries of these next tokens have been computed."""
        end = slot.length + len(tokens)
        assert end <= self.max_tokens
        self.tokens[slot.index, slot.length : end] = tokens
        slot.length = end
        if slot.begin:
            return  # its beginning is missing: no other text may take it for a whole one
        hashes = self._hashes[slot.index]
        known = len(hashes) * BLOCK
        previous = hashes[-1] if hashes else slot.salt
        for found in _chain(previous, self.tokens[slot.index, known:end]):
            self._holders.setdefault(found, {})[slot.index] = None
            hashes.append(found)

    def close(self, key: Key) -> None:
        """A text has ended: its slot may be taken, and until then be shared from."""
        slot = self._by_key.pop(key, None)
        if slot is not None:
            slot.key = None

    def _touch(self, slot: Slot) -> None:
        slot.used_at = self._clock()
        self._by_age.move_to_end(slot.index)

    def _best_holder(self, found: int, index: int) -> int:
        """A slot that holds a beginning; slot ``index`` itself if it does, to save the copy."""
        holders = self._holders[found]
        return index if index in holders else next(iter(holders))

    def _holds(self, index: int, salt: int, text: Int32Array) -> bool:
        """Whether a slot holds this beginning; hashes are only hints."""
        slot = self._slots[index]
        return (
            slot.salt == salt
            and slot.begin == 0
            and slot.length >= len(text)
            and bool(np.array_equal(self.tokens[index, : len(text)], text))
        )

    def _drop_blocks(self, index: int, num_kept: int) -> None:
        hashes = self._hashes[index]
        for found in hashes[num_kept:]:
            holders = self._holders[found]
            del holders[index]
            if not holders:
                del self._holders[found]
        del hashes[num_kept:]


def _chain(previous: int, tokens: Int32Array) -> Iterator[int]:
    """Hashes of the whole blocks of ``tokens``, each with all that stands before it."""
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        previous = hash((previous, tokens[begin : begin + BLOCK].tobytes()))
        yield previous
