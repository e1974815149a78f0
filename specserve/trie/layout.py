"""The arrays of one trie: sizes, names, and how many bytes they take."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LEVELS = (2, 4, 8, 16)
"""Context lengths, in tokens, by which a place in the text can be found."""

PAGE = 64
"""Tokens of one page, the unit that is evicted."""

BUCKET = 8
"""Entries of a hash bucket: one cache line."""

_ENTRIES_PER_TOKEN = 1.25
_ID_BYTES = 200
"""A sequence's id and its places in Python's own dictionary and list."""

FROM_CLUSTER, PRIVATE, CUT = 1, 2, 4
"""Flags of a page: taught by another replica; only for its own request; it does not go on where the
page before it ends. Those of a sequence are for its next page."""

MOST_USE = 3
"""Up to where the use of a page is counted."""

NUM_FREE_PAGES, HAND, CLOCK, NUM_FREE_SLOTS, NUM_TOKENS, NUM_EVICTED, NUM_SCALARS = range(7)
"""Indices of ``Arrays.scalars``. The clock counts the tokens ever taken."""


class Arrays(NamedTuple):
    """All of a trie's memory, for P pages and as many sequences.

    A *position* is ``page * PAGE + offset``. A page belongs to one sequence, the text of one
    request; its pages form a list in the order of the text.

    Attributes:
        tokens: int32 ``[P * PAGE]``.
        older: int32 ``[levels, P * PAGE]``, the place before this one with the same context; -1.
        table: uint64 ``[levels, buckets * BUCKET]``, newest place of each context: the context's
            hash in the upper half, position + 1 in the lower; 0 is free.
        page_next: int32 ``[P]``, next page of the sequence; -1.
        page_prev: int32 ``[P]``, page before it; -1.
        page_length: int32 ``[P]``, tokens in it; 0: the page is free.
        page_output: int32 ``[P]``, offset of the first token that was output, not prompt.
        page_slot: int32 ``[P]``, slot of its sequence.
        page_stamp: int64 ``[P]``, the clock when the page was begun.
        page_use: uint8 ``[P]``, recent use, counted down by the eviction's hand.
        page_flags: uint8 ``[P]``.
        free_pages: int32 ``[P]``, a stack.
        slot_head: int32 ``[P]``, first page of a sequence; -1.
        slot_tail: int32 ``[P]``, last page; -1.
        slot_open: bool ``[P]``, the sequence still grows.
        slot_flags: uint8 ``[P]``, flags for its next page.
        free_slots: int32 ``[P]``, a stack.
        scalars: int64 ``[NUM_SCALARS]``.
    """

    tokens: npt.NDArray[np.int32]
    older: npt.NDArray[np.int32]
    table: npt.NDArray[np.uint64]
    page_next: npt.NDArray[np.int32]
    page_prev: npt.NDArray[np.int32]
    page_length: npt.NDArray[np.int32]
    page_output: npt.NDArray[np.int32]
    page_slot: npt.NDArray[np.int32]
    page_stamp: npt.NDArray[np.int64]
    page_use: npt.NDArray[np.uint8]
    page_flags: npt.NDArray[np.uint8]
    free_pages: npt.NDArray[np.int32]
    slot_head: npt.NDArray[np.int32]
    slot_tail: npt.NDArray[np.int32]
    slot_open: npt.NDArray[np.bool_]
    slot_flags: npt.NDArray[np.uint8]
    free_slots: npt.NDArray[np.int32]
    scalars: npt.NDArray[np.int64]


def allocate(num_pages: int) -> Arrays:
    """Empty arrays."""
    size = num_pages * PAGE
    buckets = max(int(size * _ENTRIES_PER_TOKEN) // BUCKET, 1)
    stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
    scalars = np.zeros(NUM_SCALARS, np.int64)
    scalars[[NUM_FREE_PAGES, NUM_FREE_SLOTS]] = num_pages

    def pages(dtype: type[np.generic], fill: int = 0) -> npt.NDArray[Any]:
        return np.full(num_pages, fill, dtype)

    # The table is written now, all of it: a text touches it everywhere, and would wait while the
    # system clears hundreds of megabytes.
    return Arrays(
        tokens=np.empty(size, np.int32),
        older=np.empty((len(LEVELS), size), np.int32),
        table=np.full((len(LEVELS), buckets * BUCKET), 0, np.uint64),
        page_next=pages(np.int32, -1),
        page_prev=pages(np.int32, -1),
        page_length=pages(np.int32),
        page_output=pages(np.int32),
        page_slot=pages(np.int32),
        page_stamp=pages(np.int64),
        page_use=pages(np.uint8),
        page_flags=pages(np.uint8),
        free_pages=stack,
        slot_head=pages(np.int32, -1),
        slot_tail=pages(np.int32, -1),
        slot_open=pages(np.bool_),
        slot_flags=pages(np.uint8),
        free_slots=stack.copy(),
        scalars=scalars,
    )


def pages_in(max_bytes: int) -> int:
    """How many pages fit, with everything that they need."""
    two = sum(array.nbytes for array in allocate(2 * BUCKET))
    one = sum(array.nbytes for array in allocate(BUCKET))
    page = (two - one) // BUCKET + _ID_BYTES
    return min((max_bytes - 4096) // page, (2**31 - 1) // PAGE - 1)
