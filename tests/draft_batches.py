"""Draft batches made of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specserve.core.types import DraftBatch


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
