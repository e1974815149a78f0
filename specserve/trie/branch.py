"""What followed a text: the trie's branch below its context, built when it is asked for.

A lookup takes the longest context that has places, and walks on from all of them at once. A hash
is never trusted: tokens are compared, so that a place that was evicted or overwritten since is seen
for what it is.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from specserve.core.compile import kernel
from specserve.trie.contexts import (
    LENGTHS,
    LONGEST,
    MULTIPLIER,
    NUM_LEVELS,
    ONE,
    mix,
    newest_place,
)
from specserve.trie.layout import BUCKET, CLOCK, CUT, FROM_CLUSTER, LEVELS, MOST_USE, PAGE, PRIVATE

_MOST_PLACES = 16
"""Places of one context that a lookup weighs."""

_MOST_HOPS = 32
_DOUBT = 8.0
"""A path whose context matches in ``n`` tokens goes on right with a chance of ``n^2 / (n^2 + 8)``,
where all places agree. Seen on Python code: 0.3 after 2 tokens, 0.6 after 6, 0.98 after 32."""
_LONGEST_MATCH = 32


@njit(nogil=True, inline="always")
def _following(a, position):  # type: ignore[no-untyped-def]
    """The position after this one in the text; -1 at its end and before a gap."""
    page = position // PAGE
    if position % PAGE + 1 < a.page_length[page]:
        return position + 1
    after = a.page_next[page]
    if position % PAGE + 1 == PAGE and after >= 0 and not a.page_flags[after] & CUT:
        return np.int64(after) * PAGE
    return -1


@njit(nogil=True, inline="always")
def _match_len(a, position, text, length):  # type: ignore[no-untyped-def]
    """How many tokens up to ``position`` equal the last ones of ``text[:length]``."""
    page = position // PAGE
    offset = position % PAGE
    if offset >= a.page_length[page]:
        return 0
    longest = min(_LONGEST_MATCH, length)
    count = 0
    while count < longest and a.tokens[page * PAGE + offset] == text[length - 1 - count]:
        count += 1
        offset -= 1
        if offset < 0:
            prev = a.page_prev[page]
            if prev < 0 or a.page_flags[page] & CUT:
                break
            page, offset = prev, PAGE - 1
    return count


@njit(nogil=True, inline="always")
def _contains(places, count, position):  # type: ignore[no-untyped-def]
    for i in range(count):  # noqa: SIM110  # numba compiles no generator
        if places[i] == position:
            return True
    return False


@njit(nogil=True)
def _gather(a, text, length, slot, min_match_len, weights, places, place_weights, matches):  # type: ignore[no-untyped-def]
    """Places of the longest context that has any: the tokens that followed it, and their weights.

    Returns:
        How many.
    """
    num_buckets = np.uint64(a.table.shape[1] // BUCKET)
    own_weight, prompt_weight, decay = weights
    states = np.empty(NUM_LEVELS, np.uint64)
    state, power, num_levels = np.uint64(0), ONE, 0
    for back in range(min(LONGEST, length)):
        state += (np.uint64(text[length - 1 - back]) + ONE) * power
        power *= MULTIPLIER
        if back + 1 == LENGTHS[num_levels]:
            states[num_levels] = state
            num_levels += 1
    for level in range(num_levels - 1, -1, -1):
        if level + 1 < NUM_LEVELS and LENGTHS[level + 1] <= min_match_len:
            return 0  # whatever is found from here on matches less
        count = 0
        position = newest_place(a.table[level], mix(states[level]), num_buckets)
        for _ in range(_MOST_HOPS):
            if position < 0 or count == _MOST_PLACES:
                break
            page = position // PAGE
            match = _match_len(a, position, text, length)
            if match < LENGTHS[level]:
                break  # overwritten since
            is_own = a.page_slot[page] == slot
            after = _following(a, position)
            if _contains(places, count, after):
                break  # overwritten since, and led back to here
            if (
                after >= 0
                and match >= min_match_len
                and (is_own or not a.page_flags[page] & PRIVATE)
            ):
                weight = match * np.exp2(decay * (a.page_stamp[page] - a.scalars[CLOCK]))
                if is_own:
                    weight *= own_weight
                elif after % PAGE < a.page_output[after // PAGE]:
                    weight *= prompt_weight
                places[count] = after
                place_weights[count] = weight
                matches[count] = match
                count += 1
            position = np.int64(a.older[level, position])
        if count:
            return count
    return 0


@njit(nogil=True)
def _heaviest(a, places, weights, count):  # type: ignore[no-untyped-def]
    """The token that follows with the greatest weight: (token, its weight, weight of all)."""
    total = 0.0
    first = a.tokens[places[0]]
    is_one = True
    for i in range(count):
        total += weights[i]
        is_one = is_one and a.tokens[places[i]] == first
    if is_one:
        return first, total, total
    best, best_weight = first, 0.0
    for i in range(count):
        token, weight = a.tokens[places[i]], 0.0
        for j in range(count):
            if a.tokens[places[j]] == token:
                weight += weights[j]
        if weight > best_weight:
            best, best_weight = token, weight
    return best, best_weight, total


@kernel
def lookup(  # type: ignore[no-untyped-def]
    a,
    rows,
    token_ids,
    num_tokens,
    limits,
    slots,
    min_match_len,
    floor,
    weights,
    drafts,
    lengths,
    match_lens,
    chances,
    from_cluster,
):
    """Drafts for a batch.

    Args:
        a: arrays; the use of the pages that drafts are taken from is counted.
        rows: int64 ``[m]``, the rows of the arrays below to draft for.
        token_ids: int32 ``[n, >= max(num_tokens)]``, contexts.
        num_tokens: int32 ``[n]``, their lengths.
        limits: int32 ``[n]``, longest draft.
        slots: int64 ``[n]``, the requests' own sequences; -1: none.
        min_match_len: shortest match, in tokens.
        floor: a draft ends before its path's probability falls below this.
        weights: (of a place in the request's own text, of one in another's prompt, doublings of
            weight a token of recency).
        drafts: int32 ``[n, >= max(limits)]``, written.
        lengths: int64 ``[n]``, tokens in each draft, written.
        match_lens: int64 ``[n]``, longest match behind each draft, written.
        chances: float64 ``[n, >= max(limits)]``, of each token, those before it given, written.
        from_cluster: bool ``[n]``, most of the draft's weight was taught by others, written.
    """
    places = np.empty(_MOST_PLACES, np.int64)
    place_weights = np.empty(_MOST_PLACES, np.float64)
    matches = np.empty(_MOST_PLACES, np.int64)
    for row in rows:
        lengths[row] = match_lens[row] = 0
        from_cluster[row] = False
        if limits[row] <= 0 or num_tokens[row] < LEVELS[0]:
            continue
        text, slot = token_ids[row], slots[row]
        length = np.int64(num_tokens[row])
        count = _gather(
            a, text, length, slot, min_match_len, weights, places, place_weights, matches
        )
        longest = np.int64(0)
        for i in range(count):
            longest = max(longest, matches[i])
        probability = 1.0
        for index in range(limits[row]):
            if not count:
                break
            token, weight, total = _heaviest(a, places, place_weights, count)
            matched = float(longest + index) ** 2
            chance = weight / total * matched / (matched + _DOUBT)
            probability *= chance
            if probability < floor:
                break
            drafts[row, index] = token
            lengths[row] = index + 1
            chances[row, index] = chance
            kept, taught = 0, 0.0
            for i in range(count):
                if a.tokens[places[i]] != token:
                    continue
                page = places[i] // PAGE
                if index == 0:
                    a.page_use[page] = min(a.page_use[page] + 1, MOST_USE)
                    match_lens[row] = max(match_lens[row], matches[i])
                    if a.page_flags[page] & FROM_CLUSTER:
                        taught += place_weights[i]
                after = _following(a, places[i])
                if after >= 0:
                    places[kept] = after
                    place_weights[kept] = place_weights[i]
                    kept += 1
            if index == 0:
                from_cluster[row] = 2.0 * taught > weight
            count = kept
