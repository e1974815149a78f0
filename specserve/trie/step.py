"""One decoding step of a trie: what is new of each text is learned, then all are looked up."""

from __future__ import annotations

import numpy as np

from specserve.core.compile import kernel
from specserve.trie.branch import lookup
from specserve.trie.pages import append, new_scratch, open_slot


@kernel
def step(  # type: ignore[no-untyped-def]
    a,
    rows,
    batch,
    limits,
    sequences,
    learned,
    skips_prompts,
    small,
    budget,
    min_match_len,
    floor,
    weights,
    begins,
    ends,
    drafts,
):
    """Learns and looks up.

    Args:
        a: arrays.
        rows: int64 ``[m]``, the rows of the batch that belong to this trie.
        batch: (slots int64 ``[n]``, token_ids int32 ``[n, >= max(num_tokens)]``, num_tokens int32
            ``[n]``, num_prompt_tokens int32 ``[n]``).
        limits: int32 ``[n]``, longest drafts; 0: none.
        sequences: int64 ``[slots]``, each request's sequence in the trie.
        learned: int64 ``[slots]``, tokens learned of each; updated.
        skips_prompts: whether to learn nothing of prompts.
        small: what at most so many tokens are new of is learned in any case.
        budget: tokens of other texts to learn.
        min_match_len: see :func:`specserve.trie.branch.lookup`, as the next two.
        floor: see there.
        weights: see there.
        begins: int64 ``[n]``, written: what was learned of each row.
        ends: int64 ``[n]``, written.
        drafts: of n rows, written.

    Returns:
        What is left of the budget.
    """
    slots, token_ids, num_tokens, num_prompt_tokens = batch
    own = np.full(slots.shape[0], -1, np.int64)
    begins[:] = ends[:] = 0
    for row in rows:
        slot = slots[row]
        own[row] = open_slot(a, sequences[slot])
        begin = learned[slot]
        missing = max(num_tokens[row] - begin, 0)
        if missing > small:
            missing = min(missing, budget)
            budget -= missing
        end = begin + missing
        learned[slot] = ends[row] = end
        begins[row] = min(max(begin, num_prompt_tokens[row]), end) if skips_prompts else begin
    append(a, new_scratch(), own, token_ids, begins, ends, num_prompt_tokens)
    lookup(a, rows, token_ids, num_tokens, limits, own, min_match_len, floor, weights, drafts)
    return budget
