"""What a replica knows of its texts at the drafter."""

from __future__ import annotations

import math
import time

import numpy as np

from specserve.core.types import BoolArray, DraftBatch, Int32Array, Int64Array
from specserve.sources.pending_states import PendingStates
from specserve.wire.messages import MAX_ROWS, MAX_TOKENS, RowAnswer, TextRow


class DrafterTexts:
    """Which part of each text the drafter holds, and which texts may be sent.

    A text is in one request at a time, and rests where the drafter could not take it.

    Args:
        num_slots: texts at a time.

    Attributes:
        numbers: int64 ``[num_slots]``, the texts' names.
        salts: uint64 ``[num_slots]``, equal for texts that may share a beginning.
        held: int64 ``[num_slots]``, positions, by the drafter's last answer.
        has_room: bool ``[num_slots]``, whether the drafter has, as far as is known.
    """

    def __init__(self, num_slots: int) -> None:
        self.numbers = np.zeros(num_slots, np.int64)
        self.salts = np.zeros(num_slots, np.uint64)
        self.held = np.zeros(num_slots, np.int64)
        self.has_room = np.ones(num_slots, np.bool_)
        self._num_opened = 0
        self._request = np.zeros(num_slots, np.int64)  # the one under way with it; 0: none is
        self._is_known = np.zeros(num_slots, np.bool_)  # to the drafter
        self._is_partial = np.zeros(num_slots, np.bool_)  # the drafter began it behind a gap
        self._rests_until = np.zeros(num_slots)  # monotonic time before which it is not sent

    @property
    def is_any_known(self) -> bool:
        """Whether the drafter knows any text."""
        return bool(self._is_known.any())

    def open(self, slot: int, salt: int, *, is_wanted: bool) -> None:
        """A text begins; ``is_wanted``: it is sent at all."""
        self.numbers[slot], self.salts[slot] = self._num_opened, salt
        self._num_opened += 1
        self.held[slot], self._rests_until[slot] = 0, 0.0 if is_wanted else math.inf
        self._is_partial[slot], self.has_room[slot] = False, True

    def close(self, slots: Int64Array) -> list[int]:
        """These texts have ended; returns the numbers of those that the drafter knows."""
        known = self.numbers[slots[self._is_known[slots]]].tolist()
        self._is_known[slots], self._request[slots] = False, 0
        return list(known)

    def begin_anew(self) -> None:
        """Another drafter takes over: it holds nothing."""
        self.held[:], self.has_room[:] = 0, True
        self._rests_until[np.isfinite(self._rests_until)] = 0.0

    def may_be_sent(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``: texts that are wanted, not under way, and do not rest."""
        return self._rests_until[slots] <= time.monotonic()

    def are_under_way(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``: texts that an unanswered request has a row of."""
        return self._request[slots] > 0

    def rows(
        self,
        batch: DraftBatch,
        rows: Int64Array,
        ends: Int64Array,
        limits: Int32Array,
        states: PendingStates | None,
        state_bytes: int,
    ) -> list[TextRow]:
        """What a request tells of some texts; of the first ones, where there is no more room.

        Args:
            batch: the step's.
            rows: int64 ``[r]``, of the batch.
            ends: int64 ``[r]``, of what is sent of each.
            limits: int32 ``[r]``, tokens to draft of each.
            states: what is kept for a drafter that continues states.
            state_bytes: room for states.
        """
        slots, sent, num_tokens = batch.slots[rows], list[TextRow](), 0
        of_texts = self.held[slots], self.numbers[slots], self.salts[slots]
        columns = (each.tolist() for each in (rows, slots, ends, limits, *of_texts))
        for row, slot, end, limit, held, number, salt in zip(*columns, strict=True):
            start = states_start = min(held, end - 1)
            own = None
            if states is not None:
                states_start = max(start, int(states.starts[slot]))
                if states_start < end - 1:
                    own = states.between(slot, states_start, end - 1)
                    state_bytes -= own.nbytes
            num_tokens += end - start
            if num_tokens > MAX_TOKENS or state_bytes < 0 or len(sent) == MAX_ROWS:
                break
            sent.append(
                TextRow(
                    text=number,
                    salt=salt,
                    start=start,
                    tokens=batch.token_ids[row, start:end],
                    states_start=states_start,
                    states=own,
                    max_draft_tokens=limit,
                )
            )
        return sent

    def send(self, slots: Int64Array, number: int) -> None:
        """A request has a row of each of these."""
        self._request[slots], self._is_known[slots] = number, True
        self._rests_until[slots], self.has_room[slots] = math.inf, True

    def settle(self, slots: Int64Array, number: int) -> BoolArray:
        """A request of these texts is not under way any more, answered or not.

        Returns:
            bool ``[m]``: the texts that it was still under way with; others have ended since.
        """
        is_own: BoolArray = self._request[slots] == number
        self._request[slots[is_own]], self._rests_until[slots[is_own]] = 0, 0.0
        return is_own

    def rest(self, slots: Int64Array, seconds: float) -> None:
        """These are not sent for some time."""
        self._rests_until[slots] = time.monotonic() + seconds

    def begins_partial(self, slot: int, row: RowAnswer) -> bool:
        """Whether an answer is the first one to tell that the text was begun behind a gap."""
        is_first = row.begin > 0 and not self._is_partial[slot]
        self._is_partial[slot] |= is_first
        return bool(is_first)

    def is_refused(self, slot: int, row: RowAnswer) -> bool:
        """Whether an answer tells that the drafter has no room for the text, or cannot read it."""
        return row.problem == "unfit" or not (row.problem or row.held or self.held[slot])
