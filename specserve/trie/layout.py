"""The arrays of one trie: sizes, names, and how many bytes they take."""

from __future__ import annotations

import mmap
from math import prod
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

FROM_CLUSTER, PRIVATE, CUT = 1, 2, 4
"""Flags of a page: taught by another replica; only for its own request; it does not go on where the
page before it ends. Those of a sequence are for its next page."""

MOST_USE = 3
"""Up to where the use of a page is counted."""

NEXT, PREV, LENGTH, OUTPUT, OWNER, STAMP, FLAGS = range(7)
"""Columns of ``Arrays.pages``."""

HEAD, TAIL, IS_OPEN, NEXT_FLAGS, GENERATION = range(5)
"""Columns of ``Arrays.slots``."""

NUM_FREE_PAGES, HAND, CLOCK, NUM_FREE_SLOTS, NUM_TOKENS, NUM_EVICTED, NUM_SCALARS = range(7)
"""Indices of ``Arrays.scalars``. The clock counts the tokens ever taken."""

COLUMNS = 8
"""Of pages and of slots: half a cache line."""
_LINE = 64


class Arrays(NamedTuple):
    """All of a trie's memory, for P pages and as many sequences, each in a slot.

    A *position* is ``page * PAGE + offset``. A page belongs to one sequence, the text of one
    request; its pages form a list in the order of the text.

    Attributes:
        tokens: int32 ``[P * PAGE]``.
        older: int32 ``[P * PAGE, levels]``, the place before this one with the same context; -1.
        table: uint64 ``[levels, buckets * BUCKET]``, newest place of each context: the context's
            hash in the upper half, position + 1 in the lower; 0 is free.
        pages: int32 ``[P, 8]``. Pages after and before this one in its sequence, -1 for none;
            tokens in it, 0 where it is free; offset of the first token that was output and not
            prompt; slot of its sequence; the clock when it was begun, in units of ``PAGE`` tokens;
            flags.
        page_use: uint8 ``[P]``, recent use, counted down by the eviction's hand.
        slots: int32 ``[P, 8]``. First and last page of the sequence, -1 for none; 1 while it still
            grows; flags for its next page; number of sequences that had the slot so far.
        free_pages: int32 ``[P]``, a stack.
        free_slots: int32 ``[P]``, a stack.
        scalars: int64 ``[NUM_SCALARS]``.
    """

    tokens: npt.NDArray[np.int32]
    older: npt.NDArray[np.int32]
    table: npt.NDArray[np.uint64]
    pages: npt.NDArray[np.int32]
    page_use: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.int32]
    free_pages: npt.NDArray[np.int32]
    free_slots: npt.NDArray[np.int32]
    scalars: npt.NDArray[np.int64]


def allocate(num_pages: int) -> Arrays:
    """Empty arrays, in one piece of memory: buckets are cache lines, and pages of the system large
    where it has them, since a text touches the memory everywhere."""
    sizes = _sizes(num_pages)
    memory = mmap.mmap(-1, _num_bytes(num_pages), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Written now, all of it: a step would wait while the system clears memory.
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0
    arrays, offset = {}, 0
    for name, (shape, dtype) in sizes.items():
        array = np.frombuffer(memory, dtype, prod(shape), offset)
        arrays[name] = array.reshape(shape)
        offset += _rounded(array.nbytes)
    made = Arrays(**arrays)
    reset(made)
    return made


def reset(arrays: Arrays) -> None:
    """Empties the arrays; clock, evictions and generations go on."""
    num_pages = len(arrays.pages)
    counters = arrays.scalars[[CLOCK, NUM_EVICTED]]
    arrays.table[:] = 0
    arrays.pages[:] = 0
    arrays.page_use[:] = 0
    arrays.slots[:, [HEAD, TAIL]] = -1
    arrays.slots[:, [IS_OPEN, NEXT_FLAGS]] = 0
    arrays.free_pages[:] = arrays.free_slots[:] = np.arange(num_pages - 1, -1, -1)
    arrays.scalars[:] = 0
    arrays.scalars[[CLOCK, NUM_EVICTED]] = counters
    arrays.scalars[[NUM_FREE_PAGES, NUM_FREE_SLOTS]] = num_pages


def pages_in(max_bytes: int) -> int:
    """How many pages fit, with everything that they need."""
    page = (_num_bytes(2 * _LINE) - _num_bytes(_LINE)) // _LINE
    return min((max_bytes - 4096) // page, (2**31 - 1) // PAGE - 1)


def _sizes(num_pages: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    size = num_pages * PAGE
    buckets = max(int(size * _ENTRIES_PER_TOKEN) // BUCKET, 1)
    return {
        "table": ((len(LEVELS), buckets * BUCKET), np.uint64),
        "tokens": ((size,), np.int32),
        "older": ((size, len(LEVELS)), np.int32),
        "pages": ((num_pages, COLUMNS), np.int32),
        "page_use": ((num_pages,), np.uint8),
        "slots": ((num_pages, COLUMNS), np.int32),
        "free_pages": ((num_pages,), np.int32),
        "free_slots": ((num_pages,), np.int32),
        "scalars": ((NUM_SCALARS,), np.int64),
    }


def _num_bytes(num_pages: int) -> int:
    sizes = _sizes(num_pages).values()
    return sum(_rounded(prod(shape) * np.dtype(dtype).itemsize) for shape, dtype in sizes)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
