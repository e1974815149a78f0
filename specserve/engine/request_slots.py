"""Assigns a slot to each request, the index of its state in all arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from specserve.core.types import Int64Array


class RequestSlots:
    """Assigns each request a slot from its first step to its last.

    There must be more slots than requests in any step. ``by_id`` maps request ids to slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.by_id: dict[str, int] = {}
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return self._num_slots

    def of(self, request_ids: Sequence[str]) -> Int64Array:
        """Slots of requests that all have one, int64 ``[n]``."""
        by_id = self.by_id
        return np.array([by_id[each] for each in request_ids], np.int64)

    def missing(self, request_ids: Sequence[str]) -> list[str]:
        """The ids among ``request_ids`` that have no slot."""
        by_id = self.by_id
        return [each for each in request_ids if each not in by_id]

    def find(self, request_ids: Iterable[str]) -> Int64Array:
        """Slots of the requests that have one, int64; others are skipped."""
        found = (self.by_id.get(each, -1) for each in request_ids)
        return np.array([slot for slot in found if slot >= 0], np.int64)

    def victim(self, present: Collection[str]) -> str | None:
        """The request that must lose its slot for a new one; None if a slot is free.

        It is the oldest request that is not in this step, so a pre-empted one.
        """
        if self._free:
            return None
        here = set(present)
        return next(each for each in self.by_id if each not in here)

    def add(self, request_id: str) -> int:
        """Assigns a free slot to a request that has none."""
        slot = self.by_id[request_id] = self._free.pop()
        return slot

    def free(self, request_ids: Iterable[str]) -> None:
        """Frees the slots of ended requests; requests without a slot are ignored."""
        for request_id in request_ids:
            slot = self.by_id.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)
