"""A slot for each request that drafts are made for: the place of its state in all arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from specserve.core.types import Int64Array


class RequestSlots:
    """Gives each request a slot from its first step to its last.

    There must be more slots than requests in any one step. ``by_id`` has those that are given.
    """

    def __init__(self, num_slots: int) -> None:
        self.by_id: dict[str, int] = {}
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return self._num_slots

    def of(self, request_ids: Sequence[str]) -> Int64Array:
        """int64 ``[n]``, the slots of these requests, which all have one."""
        by_id = self.by_id
        return np.array([by_id[each] for each in request_ids], np.int64)

    def missing(self, request_ids: Sequence[str]) -> list[str]:
        """Those of these requests that have no slot."""
        by_id = self.by_id
        return [each for each in request_ids if each not in by_id]

    def find(self, request_ids: Iterable[str]) -> Int64Array:
        """The slots of those of these requests that have one."""
        found = (self.by_id.get(each, -1) for each in request_ids)
        return np.array([slot for slot in found if slot >= 0], np.int64)

    def victim(self, present: Collection[str]) -> str | None:
        """Whose slot is to be freed before another can be given; None: there is a free one.

        A request that is not in this step was pre-empted. The first of those is the one that began
        earliest.
        """
        if self._free:
            return None
        here = set(present)
        return next(each for each in self.by_id if each not in here)

    def add(self, request_id: str) -> int:
        """A free slot for a request that has none yet."""
        slot = self.by_id[request_id] = self._free.pop()
        return slot

    def free(self, request_ids: Iterable[str]) -> None:
        """These requests have ended; those without a slot are fine."""
        for request_id in request_ids:
            slot = self.by_id.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)
