"""One decoding step of a trie: what is new of each text is learned, then all are looked up."""

from __future__ import annotations

from specserve.core.compile import lean_kernel
from specserve.core.types import Drafts
from specserve.trie.branch import group_in, lookup
from specserve.trie.layout import Arrays
from specserve.trie.pages import Scratch, append, open_slot, put_waiting

SMALL_TOKENS = 256
"""What a step or a short prompt adds: no other request's long prompt makes it wait."""


@lean_kernel
def step(  # type: ignore[no-untyped-def]
    table,
    log_tokens,
    older,
    pages,
    page_use,
    log_slots,
    free_pages,
    free_slots,
    scalars,
    waiting,
    prefix,
    group_numbers,
    group_newest,
    group_places,
    group_weights,
    rows,
    slots,
    token_ids,
    num_tokens,
    num_prompt_tokens,
    limits,
    sequences,
    learned,
    begins,
    ends,
    tokens,
    lengths,
    confidence,
    labels,
    skips_prompts,
    budget,
    min_match_len,
    floor,
):
    """:meth:`specserve.trie.token_trie.TokenTrie.step`, with its arrays one by one.

    First those of :class:`specserve.trie.layout.Arrays` and :class:`specserve.trie.pages.Scratch`,
    then of :func:`specserve.trie.branch.room_for_group`; ``tokens`` to ``labels`` are the drafts'.
    """
    a = Arrays(
        table, log_tokens, older, pages, page_use, log_slots, free_pages, free_slots, scalars
    )
    scratch, num_waiting = Scratch(waiting, prefix), 0
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
        group_in(group_numbers, group_newest, group_places, group_weights),
        rows,
        (slots, token_ids, num_tokens),
        limits,
        sequences,
        min_match_len,
        floor,
        Drafts(tokens, lengths, confidence, labels),
    )
    return budget
