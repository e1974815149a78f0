"""What a request tells a drafter of the texts of a batch."""

from __future__ import annotations

from specserve.core.types import DraftBatch, Int32Array, Int64Array
from specserve.sources.drafter_texts import DrafterTexts
from specserve.sources.pending_states import PendingStates
from specserve.wire.messages import MAX_ROWS, MAX_TOKENS, TextRow


def text_rows(
    batch: DraftBatch,
    rows: Int64Array,
    ends: Int64Array,
    limits: Int32Array,
    texts: DrafterTexts,
    states: PendingStates | None,
    state_bytes: int,
) -> list[TextRow]:
    """What is new of some texts; of the first ones, where there is no more room.

    Args:
        batch: n requests.
        rows: int64 ``[r]``.
        ends: int64 ``[r]``, of what is sent of each.
        limits: int32 ``[r]``, tokens to draft of each.
        texts: what the drafter holds.
        states: what is kept for a drafter that continues states.
        state_bytes: room for states.
    """
    slots, sent, num_tokens = batch.slots[rows], list[TextRow](), 0
    of_texts = texts.held[slots], texts.numbers[slots], texts.salts[slots]
    columns = (each.tolist() for each in (rows, slots, ends, limits, *of_texts))
    for row, slot, end, limit, held, number, salt in zip(*columns, strict=True):
        start = states_start = min(held, end - 1)
        own = None
        if states is not None:
            states_start = max(start, int(states.starts[slot]))
            if states_start < end - 1:
                own = states.between(slot, states_start, end - 1)
                state_bytes -= own.nbytes
        num_tokens += end - start
        if num_tokens > MAX_TOKENS or state_bytes < 0 or len(sent) == MAX_ROWS:
            break
        sent.append(
            TextRow(
                text=number,
                salt=salt,
                start=start,
                tokens=batch.token_ids[row, start:end],
                states_start=states_start,
                states=own,
                max_draft_tokens=limit,
            )
        )
    return sent
