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
"""Tokens of a page, the unit of eviction."""

BUCKET = 8
"""Entries of a hash bucket: one cache line."""

_ENTRIES_PER_TOKEN = 1.25

FROM_CLUSTER, PRIVATE, CUT = 1, 2, 4
"""Flags of a page: text of another replica; used for its own request only; does not continue the
page before it. A slot's flags are for its next page."""

MAX_USE = 3
"""Largest value of ``Arrays.page_use``."""

NEXT, PREV, LENGTH, OWNER, FLAGS = range(5)
"""Columns of ``Arrays.pages``."""

HEAD, TAIL, IS_OPEN, NEXT_FLAGS, GENERATION = range(5)
"""Columns of ``Arrays.slots``."""

NUM_FREE_PAGES, HAND, NUM_INGESTED, NUM_FREE_SLOTS, NUM_TOKENS, NUM_EVICTED, NUM_SCALARS = range(7)
"""Indices of ``Arrays.scalars``; of tokens: held now, and ingested and evicted so far."""

COLUMNS = 8
"""Columns of ``Arrays.pages`` and ``Arrays.slots``: a row is half a cache line."""
_LINE = 64


class Arrays(NamedTuple):
    """All of a trie's memory: P pages, and a slot for each of at most P sequences.

    A sequence is the text of one request, a list of pages. A *position* is
    ``page * PAGE + offset``. The *places* of a context are the positions of its last token.

    Attributes:
        tokens: int32 ``[P * PAGE]``.
        older: int32 ``[P * PAGE, levels]``, the context's previous place; -1 for none.
        table: uint64 ``[levels, buckets * BUCKET]``, newest place of each context: half of the
            context's hash in the upper 32 bits, position + 1 in the lower; 0 is free.
        pages: int32 ``[P, 8]``. Next and previous page of the sequence, -1 for none; number of
            tokens, 0 for a free page; slot of the sequence; flags.
        page_use: uint8 ``[P]``, recent uses; the eviction scan counts them down.
        slots: int32 ``[P, 8]``. First and last page of the sequence, -1 for none; 1 while it is
            open; flags for its next page; number of sequences that have had the slot.
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
    """Allocates empty arrays in one memory mapping, with buckets aligned to cache lines.
    Huge pages are used where the system has them, because a text accesses memory at random."""
    sizes = _sizes(num_pages)
    memory = mmap.mmap(-1, _num_bytes(num_pages), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Writes to every page now: otherwise a step waits while the system clears memory.
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
    """Empties the arrays, but keeps the counts of ingested and evicted tokens, and the generations.

    The table keeps its entries. They lead nowhere, since no page has tokens.
    """
    num_pages = len(arrays.pages)
    counters = arrays.scalars[[NUM_INGESTED, NUM_EVICTED]]
    arrays.pages[:] = 0
    arrays.page_use[:] = 0
    arrays.slots[:, [HEAD, TAIL]] = -1
    arrays.slots[:, [IS_OPEN, NEXT_FLAGS]] = 0
    arrays.free_pages[:] = arrays.free_slots[:] = np.arange(num_pages - 1, -1, -1)
    arrays.scalars[:] = 0
    arrays.scalars[[NUM_INGESTED, NUM_EVICTED]] = counters
    arrays.scalars[[NUM_FREE_PAGES, NUM_FREE_SLOTS]] = num_pages


def pages_in(max_bytes: int) -> int:
    """How many pages fit in ``max_bytes``, with their tables and slots."""
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
