"""A replica's record of what the drafter holds of each text."""

from __future__ import annotations

import math
import time

import numpy as np

from specserve.core.types import BoolArray, DraftBatch, Int32Array, Int64Array
from specserve.sources.pending_states import PendingStates
from specserve.wire.messages import MAX_ROWS, MAX_TOKENS, RowAnswer, TextRow


class DrafterTexts:
    """Tracks which part of each text the drafter holds, and which texts may be sent.

    A text is in at most one unanswered request. After a refusal it is paused.

    Args:
        num_slots: most texts at a time.

    Attributes:
        numbers: int64 ``[num_slots]``, numbers that identify the texts to the drafter.
        salts: uint64 ``[num_slots]``, equal for texts that may share the cache of a prefix.
        held: int64 ``[num_slots]``, positions that the drafter holds, by its last answer.
        has_room: bool ``[num_slots]``, false if the drafter refused the text when it was last sent.
    """

    def __init__(self, num_slots: int) -> None:
        self.numbers = np.zeros(num_slots, np.int64)
        self.salts = np.zeros(num_slots, np.uint64)
        self.held = np.zeros(num_slots, np.int64)
        self.has_room = np.ones(num_slots, np.bool_)
        self._num_opened = 0
        self._request = np.zeros(num_slots, np.int64)  # unanswered request with it; 0: none
        self._is_known = np.zeros(num_slots, np.bool_)  # was sent to the drafter
        self._is_partial = np.zeros(num_slots, np.bool_)  # the drafter holds it from after a gap on
        self._not_before = np.zeros(num_slots)  # monotonic time from which it may be sent

    @property
    def is_any_known(self) -> bool:
        """Whether the drafter knows any text."""
        return bool(self._is_known.any())

    def open(self, slot: int, salt: int, *, is_wanted: bool) -> None:
        """Registers a new text; it is never sent unless ``is_wanted``."""
        self.numbers[slot], self.salts[slot] = self._num_opened, salt
        self._num_opened += 1
        self.held[slot], self._not_before[slot] = 0, 0.0 if is_wanted else math.inf
        self._is_partial[slot], self.has_room[slot] = False, True

    def close(self, slots: Int64Array) -> list[int]:
        """Removes texts that have ended; returns the numbers of those that the drafter knows."""
        known = self.numbers[slots[self._is_known[slots]]].tolist()
        self._is_known[slots], self._request[slots] = False, 0
        return list(known)

    def forget_all(self) -> None:
        """Records that the drafter is another one, which holds no text."""
        self.held[:], self.has_room[:] = 0, True
        self._not_before[np.isfinite(self._not_before)] = 0.0

    def may_be_sent(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``: texts that are wanted, in no unanswered request, and not paused."""
        return self._not_before[slots] <= time.monotonic()

    def are_in_flight(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``: texts in an unanswered request."""
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
        """Rows of a request: what each text has beyond what the drafter holds.

        The first row that exceeds a limit of a request is left out, and so are all after it.

        Args:
            batch: the step's.
            rows: int64 ``[r]``, of the batch.
            ends: int64 ``[r]``, position up to which each text is sent.
            limits: int32 ``[r]``, longest draft for each, in tokens.
            states: hidden states to send; None: the drafter needs none.
            state_bytes: most bytes of states.
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
        """Records that a request with these texts was sent."""
        self._request[slots], self._is_known[slots] = number, True
        self._not_before[slots], self.has_room[slots] = math.inf, True

    def settle(self, slots: Int64Array, number: int) -> BoolArray:
        """Records that a request was answered or given up.

        Returns:
            bool ``[m]``: texts that are still open; the others have ended since it was sent.
        """
        is_own: BoolArray = self._request[slots] == number
        self._request[slots[is_own]], self._not_before[slots[is_own]] = 0, 0.0
        return is_own

    def rest(self, slots: Int64Array, seconds: float) -> None:
        """Pauses texts: they are not sent for ``seconds``."""
        self._not_before[slots] = time.monotonic() + seconds

    def begins_partial(self, slot: int, row: RowAnswer) -> bool:
        """Whether an answer is the first to say that the drafter holds a text only after a gap."""
        is_first = row.begin > 0 and not self._is_partial[slot]
        self._is_partial[slot] |= is_first
        return bool(is_first)

    def is_refused(self, slot: int, row: RowAnswer) -> bool:
        """Whether an answer says that the drafter has no room for a text or cannot process it."""
        return row.problem == "unfit" or not (row.problem or row.held or self.held[slot])
