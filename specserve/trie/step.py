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
    """Learns and looks up.

    Args:
        table: of :class:`specserve.trie.layout.Arrays`, as all up to ``scalars``.
        waiting: of :class:`specserve.trie.pages.Scratch`, as ``prefix``.
        group_numbers: see :func:`specserve.trie.branch.room_for_group`, as all up to
            ``group_weights``.
        rows: int64 ``[m]``, the rows of the batch that belong to this trie.
        slots: int64 ``[n]``.
        token_ids: int32 ``[n, >= max(num_tokens)]``.
        num_tokens: int32 ``[n]``.
        num_prompt_tokens: int32 ``[n]``.
        limits: int32 ``[n]``, longest drafts; 0: none.
        sequences: int64 ``[slots]``, each request's sequence in the trie.
        learned: int64 ``[slots]``, tokens learned of each; updated.
        begins: int64 ``[n]``, written: what was learned of each row.
        ends: int64 ``[n]``, written.
        tokens: of :class:`specserve.core.types.Drafts`, as all up to ``labels``; of n rows at
            least, written.
        skips_prompts: whether to learn nothing of prompts.
        budget: tokens to learn of texts of which more than ``SMALL_TOKENS`` are new.
        min_match_len: see :func:`specserve.trie.branch.lookup`.
        floor: see there.

    Returns:
        What is left of the budget.
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
            num_waiting, _ = append(
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
