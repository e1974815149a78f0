"""Draft batches made of texts, and the drafts of sources for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specserve.core.types import DraftBatch, Drafts, Int32Array
from specserve.sources.base import Source


def draft_batch(
    texts: Mapping[int, Sequence[int]], *, width: int = 0, num_prompt_tokens: int | None = None
) -> DraftBatch:
    """A batch of the texts of requests, by their slots.

    Args:
        texts: prompt and output of each request.
        width: minimum width of the rows. Entries after a text are not tokens.
        num_prompt_tokens: prompt tokens of each request. None: the whole text.
    """
    counts = np.array([len(each) for each in texts.values()], np.int32)
    rows = np.full((len(texts), max(counts.max(initial=0), width)), -7, np.int32)
    for row, text in zip(rows, texts.values(), strict=True):
        row[: len(text)] = text
    num_prompts = counts if num_prompt_tokens is None else np.full_like(counts, num_prompt_tokens)
    return DraftBatch(np.array(list(texts), np.int64), rows, counts, num_prompts)


def propose(source: Source, batch: DraftBatch, limits: Int32Array) -> Drafts:
    """The source's drafts by row, with room for the longest of these limits."""
    drafts = Drafts.empty(int(batch.slots.max(initial=0)) + 1, int(limits.max(initial=1)))
    source.propose(batch, limits, drafts)
    return Drafts._make(each[batch.slots] for each in drafts)
