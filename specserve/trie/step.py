"""One decoding step of a trie: what is new of each text is learned, then all are looked up."""

from __future__ import annotations

from specserve.core.compile import kernel
from specserve.trie.branch import lookup
from specserve.trie.pages import append, open_slot, put_waiting

SMALL_TOKENS = 256
"""What a step or a short prompt adds: no other request's long prompt makes it wait."""


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
    """:meth:`specserve.trie.token_trie.TokenTrie.step`, with the trie's arrays and scratch."""
    slots, token_ids, num_tokens, num_prompt_tokens = batch
    num_waiting = 0
    for row in range(slots.shape[0]):
        begins[row] = ends[row] = 0
    for row in rows:
        slot = slots[row]
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
        own = open_slot(a, sequences[slot])
        if own >= 0:
            num_waiting = append(
                a, scratch, num_waiting, own, token_ids[row], begin, end, num_prompt_tokens[row]
            )
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
