"""Lookups in a trie, without learning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specserve.core.types import Drafts, Int32Array
from specserve.trie.token_trie import NO_SEQUENCE, TokenTrie


def look_up(
    trie: TokenTrie,
    contexts: Sequence[Int32Array],
    limits: Sequence[int],
    sequences: Sequence[int] = (),
    *,
    min_match_len: int = 2,
    floor: float = 0.0,
) -> Drafts:
    """Drafts for these contexts. Own sequences must have learned their whole contexts."""
    size = len(contexts)
    lengths = np.array([len(each) for each in contexts], np.int32)
    rows = np.zeros((size, lengths.max()), np.int32)
    for row, context in zip(rows, contexts, strict=True):
        row[: len(context)] = context
    slots = np.arange(size)
    drafts = Drafts.empty(size, max(limits))
    trie.step(
        slots,
        (slots, rows, lengths, np.zeros(size, np.int32)),
        np.array(limits, np.int32),
        np.array([*sequences] or [NO_SEQUENCE] * size, np.int64),
        lengths.astype(np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        drafts,
        min_match_len=min_match_len,
        floor=floor,
    )
    return drafts
