"""The target's hidden states that a drafter has not confirmed yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain

import numpy as np

from specserve.core.types import BoolArray, HiddenStates, Int32Array, Int64Array, UInt16Array

LARGE_TOKENS = 64
"""More states of one text than this come to the host by themselves: they are never copied again."""


class _Block:
    """States of a step that came together, of some texts.

    Args:
        slots: int64 ``[m]``.
        texts: int64 ``[m]``, the texts' names: a slot may have another one's by now.
        starts: int64 ``[m]``, first position of each.
        ends: int64 ``[m]``.
        offsets: int64 ``[m]``; the state of position p is at ``p + offset``.
        states: waits until they are there: uint16 ``[size, hidden_size]``.
        size: what is in memory.
    """

    def __init__(
        self,
        slots: Int64Array,
        texts: Int64Array,
        starts: Int64Array,
        ends: Int64Array,
        offsets: Int64Array,
        states: Callable[[], UInt16Array],
        size: int,
    ) -> None:
        self.slots, self.texts, self.ends = slots, texts, ends
        self.states, self.size = states, size
        self._starts, self._offsets = starts, offsets
        self._index = dict(zip(texts.tolist(), range(len(texts)), strict=True))

    def part(self, text: int, start: int, end: int) -> UInt16Array | None:
        """The states of those of positions ``start .. end - 1`` that it has, to their end."""
        index = self._index.get(text)
        if index is None or (first := max(start, int(self._starts[index]))) >= end:
            return None
        offset = int(self._offsets[index])
        return self.states()[first + offset : min(end, int(self.ends[index])) + offset]

    def only(self, which: BoolArray) -> _Block:
        """The states of some of the texts, in memory of their own."""
        slots, texts, starts, ends, offsets = (
            each[which] for each in (self.slots, self.texts, self._starts, self.ends, self._offsets)
        )
        states = self.states()
        bounds = zip((starts + offsets).tolist(), (ends + offsets).tolist(), strict=True)
        chosen, sizes = np.concatenate([states[start:end] for start, end in bounds]), ends - starts
        offsets = np.cumsum(sizes) - sizes - starts
        return _Block(slots, texts, starts, ends, offsets, lambda: chosen, len(chosen))


class PendingStates:
    """Keeps states by slot until they are confirmed; of each text a run without gaps.

    A step's states are on their way to the host when they are added. They are waited for when they
    are read, or in a later step, when they have long come.

    Args:
        num_slots: texts at a time.
        max_tokens: how many states of earlier steps are kept, of all texts together.

    Attributes:
        starts: int64 ``[num_slots]``, first position kept of each text.
        ends: int64 ``[num_slots]``, position after its last state.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.starts: Int64Array = np.zeros(num_slots, np.int64)
        self.ends: Int64Array = np.zeros(num_slots, np.int64)
        self._texts: Int64Array = np.zeros(num_slots, np.int64)
        self._num_texts = 0
        self._max_tokens = max_tokens
        self._blocks: list[_Block] = []  # of earlier steps, the oldest first
        self._new: list[_Block] = []
        self._size = self._needed_size = 0  # of earlier steps' blocks, now and when last looked at

    @property
    def num_tokens(self) -> int:
        """States that are not confirmed, of all texts."""
        return int((self.ends - self.starts).sum())

    def open(self, slot: int) -> None:
        """Another text's states follow, from any position on."""
        self._num_texts += 1
        self._texts[slot] = self._num_texts
        self.starts[slot] = self.ends[slot] = 0

    def first(self, slots: Int64Array, hidden: HiddenStates) -> Int64Array:
        """Where the run of some texts, all of a step in their order, begins with its states.

        Behind a gap it begins anew. States that had come before change nothing.
        """
        return np.where(hidden.starts > self.ends[slots], hidden.starts, self.starts[slots])

    def add(
        self, slots: Int64Array, num_tokens: Int32Array, hidden: HiddenStates, rows: Int64Array
    ) -> None:
        """Starts to copy what is new of a step's states; loses the oldest if there are too many.

        Args:
            slots: int64 ``[r]``, of the rows.
            num_tokens: int32 ``[r]``, tokens of their texts: the last one has no state yet, and
                those behind it are of refused drafts.
            hidden: the step's.
            rows: int64 ``[r]``, rows of the step, whose states are wanted.
        """
        self._make_room()
        sizes = hidden.num_tokens[rows].astype(np.int64)
        starts = hidden.starts[rows].astype(np.int64)
        ends = np.minimum(starts + sizes, num_tokens - 1)
        is_new = ends > np.maximum(starts, self.ends[slots])
        is_large = sizes > LARGE_TOKENS
        groups = [np.flatnonzero(is_new & ~is_large), *np.flatnonzero(is_new & is_large)[:, None]]
        for group in groups:
            if group.size:
                copy = cache(hidden.to_host(rows[group]))
                self._append(slots[group], starts[group], ends[group], sizes[group], copy)

    def between(self, slot: int, start: int, end: int) -> UInt16Array:
        """States of positions ``start .. end - 1``, which are kept; waits for their copies."""
        text, parts = int(self._texts[slot]), []
        for block in chain(reversed(self._new), reversed(self._blocks)):
            if (part := block.part(text, start, end)) is not None:
                parts.append(part)
                end -= len(part)
                if start == end:
                    break
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])

    def confirm(self, slots: Int64Array, held: Int64Array) -> None:
        """States of some texts before these positions are not needed any more."""
        confirmed = np.minimum(held, self.ends[slots])
        self.starts[slots] = np.maximum(self.starts[slots], confirmed)

    def drop(self, slots: Int64Array | int) -> None:
        """None of these texts' states are needed any more."""
        self.starts[slots] = self.ends[slots]

    def _append(
        self,
        slots: Int64Array,
        starts: Int64Array,
        ends: Int64Array,
        sizes: Int64Array,
        copy: Callable[[], UInt16Array],
    ) -> None:
        known = self.ends[slots]
        is_behind_gap = starts > known  # nothing goes on from what there was
        offsets = np.cumsum(sizes) - sizes - starts
        self.starts[slots[is_behind_gap]] = starts[is_behind_gap]
        self.ends[slots] = ends
        starts = np.maximum(starts, known)
        texts, size = self._texts[slots], int(sizes.sum())
        self._new.append(_Block(slots, texts, starts, ends, offsets, copy, size))

    def _make_room(self) -> None:
        """Gives back the memory of what was confirmed, all of it whenever it may be half."""
        kept = list(self._needed(self._new))
        self._new.clear()
        self._blocks += kept
        self._size += sum(each.size for each in kept)
        if self._size > min(2 * self._needed_size + self._max_tokens // 8, self._max_tokens):
            self._blocks = list(self._needed(self._blocks))
            self._size = self._needed_size = sum(each.size for each in self._blocks)
        while self._size > self._max_tokens:
            oldest = self._blocks.pop(0)
            self._size -= oldest.size
            is_own = self._texts[oldest.slots] == oldest.texts
            self.confirm(oldest.slots[is_own], oldest.ends[is_own])

    def _needed(self, blocks: Iterable[_Block]) -> Iterator[_Block]:
        for block in blocks:
            is_needed = self._texts[block.slots] == block.texts
            is_needed &= self.starts[block.slots] < block.ends
            if is_needed.all():
                yield block
            elif is_needed.any():
                yield block.only(is_needed)
