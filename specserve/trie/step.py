"""One decoding step of a trie: learns the new tokens of all texts, then looks up drafts."""

from __future__ import annotations

from specserve.core.compile import kernel
from specserve.trie.branch import lookup
from specserve.trie.pages import append, open_slot, put_waiting

SMALL_TOKENS = 256
"""A step learns up to this many new tokens of a text at once; the budget limits longer pieces."""


@kernel
def step(  # type: ignore[no-untyped-def]
    a,
    scratch,
    group,
    rows,
    batch,
    limits,
    sequences,
    learned,
    begins,
    ends,
    drafts,
    skips_prompts,
    budget,
    min_match_len,
    floor,
):
    """Implements :meth:`specserve.trie.token_trie.TokenTrie.step` on the trie's arrays."""
    slots, token_ids, num_tokens, num_prompt_tokens = batch
    num_waiting = 0
    for row in range(slots.shape[0]):
        begins[row] = ends[row] = 0
    for row in rows:
        slot = slots[row]
        own = open_slot(a, sequences[slot])
        if own < 0:  # cleared: the rest is neither learned nor sent to other replicas
            continue
        begin = learned[slot]
        missing = max(num_tokens[row] - begin, 0)
        if missing > SMALL_TOKENS:
            missing = min(missing, budget)
            budget -= missing
        end = begin + missing
        learned[slot] = ends[row] = end
        begins[row] = begin = (
            min(max(begin, num_prompt_tokens[row]), end) if skips_prompts else begin
        )
        num_waiting = append(a, scratch, num_waiting, own, token_ids[row], begin, end)
    put_waiting(a, scratch, num_waiting)
    lookup(
        a,
        group,
        rows,
        (slots, token_ids, num_tokens),
        limits,
        sequences,
        min_match_len,
        floor,
        drafts,
    )
    return budget
