"""What is done to a trie's arrays: append, evict, look up. Numba, without the interpreter lock.

The text is a log of pages. For each token the hashes of the last 2, 4, 8 and 16 tokens lead to the
newest place where they stood, and from place to place to the older ones. A hash is never trusted:
tokens are compared, so that a place that was evicted or overwritten since is seen for what it is.
A lookup takes the longest context that has places, and walks on from all of them at once: that is
the trie's branch below this context, built when it is asked for.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from specserve.core.compile import kernel
from specserve.trie.layout import (
    BUCKET,
    CLOCK,
    CUT,
    FROM_CLUSTER,
    HAND,
    LEVELS,
    NUM_EVICTED,
    NUM_FREE_PAGES,
    NUM_FREE_SLOTS,
    NUM_TOKENS,
    PAGE,
    PRIVATE,
)

MOST_PLACES = 16
"""Places of one context that a lookup weighs."""

_MOST_HOPS = 32
_DOUBT = 8.0
"""A path whose context matches in ``n`` tokens goes on right with a chance of ``n^2 / (n^2 + 8)``,
where all places agree. Seen on Python code: 0.3 after 2 tokens, 0.6 after 6, 0.98 after 32."""
_LONGEST_MATCH = 32
_LONGEST = LEVELS[-1]
_NUM_LEVELS = len(LEVELS)
_SCAN_PAGES = 32
_MOST_USE = 3

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FINALIZER = np.uint64(0xD6E8FEB86659FD93)
_LOW = np.uint64(0xFFFFFFFF)
_S29, _S32, _ONE = np.uint64(29), np.uint64(32), np.uint64(1)
_NUM_BUCKET = np.uint64(BUCKET)


def _outgoing() -> tuple[int, ...]:
    """The multiplier's powers by which a token leaves each level's rolling hash."""
    return tuple(pow(int(_MULTIPLIER), length, 1 << 64) for length in LEVELS)


_OUTGOING = np.array(_outgoing(), np.uint64)
_LENGTHS = np.array(LEVELS, np.int64)


@njit(nogil=True, inline="always")
def _mix(state):  # type: ignore[no-untyped-def]
    mixed = (state ^ (state >> _S29)) * _FINALIZER
    return mixed ^ (mixed >> _S32)


@njit(nogil=True, inline="always")
def _bucket(mixed, num_buckets):  # type: ignore[no-untyped-def]
    """First entry of the bucket of a hash."""
    return (((mixed >> _S32) * num_buckets) >> _S32) * _NUM_BUCKET


@njit(nogil=True)
def _hash_page_contexts(a, page, begin, end, states):  # type: ignore[no-untyped-def]
    """Hash of each level's context that ends at offsets ``begin .. end - 1`` of a page.

    Args:
        a: arrays.
        page: whose tokens are written up to ``end``.
        begin: first offset.
        end: one past the last offset.
        states: uint64 ``[levels, PAGE]``, written from index 0 on.

    Returns:
        How many tokens stand before ``begin``, at most the longest context.
    """
    window = np.empty(_LONGEST + PAGE, np.int32)
    known = min(begin, _LONGEST)
    before = 0
    if known < _LONGEST and not a.page_flags[page] & CUT and a.page_prev[page] >= 0:
        before = _LONGEST - known  # the page before it is full
        start = a.page_prev[page] * PAGE + PAGE - before
        for j in range(before):
            window[j] = a.tokens[start + j]
    for j in range(known + end - begin):
        window[before + j] = a.tokens[page * PAGE + begin - known + j]
    known += before
    for level in range(_NUM_LEVELS):
        length = _LENGTHS[level]
        state = np.uint64(0)
        for j in range(max(known - length, 0), known):
            state = state * _MULTIPLIER + np.uint64(window[j]) + _ONE
        for j in range(known, known + end - begin):
            state = state * _MULTIPLIER + np.uint64(window[j]) + _ONE
            if j >= length:
                state -= (np.uint64(window[j - length]) + _ONE) * _OUTGOING[level]
            states[level, j - known] = state
    return known


@njit(nogil=True, inline="always")
def _put(table, page_use, mixed, num_buckets, position):  # type: ignore[no-untyped-def]
    """Notes a context's newest place; returns the one noted before, or -1.

    In a full bucket the context goes whose page is used least.
    """
    start = _bucket(mixed, num_buckets)
    tag = mixed & _LOW
    entry = (tag << _S32) | np.uint64(position + 1)
    for i in range(BUCKET):
        slot = start + np.uint64(i)
        found = table[slot]
        if found == 0:
            table[slot] = entry
            return -1
        if found >> _S32 == tag:
            table[slot] = entry
            return np.int64(found & _LOW) - 1
    least, victim = _MOST_USE + 1, start
    for i in range(BUCKET):
        slot = start + ((mixed >> _S29) + np.uint64(i)) % _NUM_BUCKET
        use = page_use[(np.int64(table[slot] & _LOW) - 1) // PAGE]
        if use < least:
            least, victim = use, slot
            if not use:
                break
    table[victim] = entry
    return -1


@njit(nogil=True, inline="always")
def _get(table, mixed, num_buckets):  # type: ignore[no-untyped-def]
    """A context's newest place, or -1."""
    start = _bucket(mixed, num_buckets)
    tag = mixed & _LOW
    for i in range(BUCKET):
        found = table[start + np.uint64(i)]
        if found == 0:
            return -1
        if found >> _S32 == tag:
            return np.int64(found & _LOW) - 1
    return -1


@njit(nogil=True, inline="always")
def _replace(table, mixed, num_buckets, position, older):  # type: ignore[no-untyped-def]
    """Where ``position`` is a context's newest place, puts the older one there, or nothing."""
    start = _bucket(mixed, num_buckets)
    entry = ((mixed & _LOW) << _S32) | np.uint64(position + 1)
    for i in range(BUCKET):
        slot = start + np.uint64(i)
        if table[slot] == entry:
            if older >= 0:
                table[slot] = (entry & ~_LOW) | np.uint64(older + 1)
                return
            last = i  # the bucket stays without gaps
            while last + 1 < BUCKET and table[start + np.uint64(last + 1)] != 0:
                last += 1
            table[slot] = table[start + np.uint64(last)]
            table[start + np.uint64(last)] = np.uint64(0)
            return


@njit(nogil=True)
def _free_page(a, page, states):  # type: ignore[no-untyped-def]
    """Takes a page's contexts out of the tables and the page out of its sequence."""
    length = a.page_length[page]
    known = _hash_page_contexts(a, page, 0, length, states)
    num_buckets = np.uint64(a.table.shape[1] // BUCKET)
    for level in range(_NUM_LEVELS):
        for j in range(max(_LENGTHS[level] - known - 1, 0), length):
            position = page * PAGE + j
            mixed = _mix(states[level, j])
            _replace(a.table[level], mixed, num_buckets, position, a.older[level, position])
    prev, after, slot = a.page_prev[page], a.page_next[page], a.page_slot[page]
    if prev >= 0:
        a.page_next[prev] = after
    else:
        a.slot_head[slot] = after
    if after >= 0:
        a.page_prev[after] = prev
        a.page_flags[after] |= CUT
    else:
        a.slot_tail[slot] = prev
    a.page_length[page] = 0
    a.scalars[NUM_TOKENS] -= length
    a.free_pages[a.scalars[NUM_FREE_PAGES]] = page
    a.scalars[NUM_FREE_PAGES] += 1
    if a.slot_head[slot] < 0 and not a.slot_open[slot]:
        a.free_slots[a.scalars[NUM_FREE_SLOTS]] = slot
        a.scalars[NUM_FREE_SLOTS] += 1


@njit(nogil=True)
def _evict(a, states):  # type: ignore[no-untyped-def]
    """Frees the least used of the next pages; at most ``_SCAN_PAGES`` are looked at."""
    victim = -1
    for _ in range(_SCAN_PAGES):
        page = a.scalars[HAND]
        a.scalars[HAND] = (page + 1) % a.page_length.shape[0]
        slot = a.page_slot[page]
        if a.page_length[page] == 0 or (a.slot_open[slot] and a.slot_tail[slot] == page):
            continue
        if victim < 0 or a.page_use[page] < a.page_use[victim]:
            victim = page
        if a.page_use[page] == 0:
            break
        a.page_use[page] -= 1
    if victim >= 0:
        a.scalars[NUM_EVICTED] += a.page_length[victim]
        _free_page(a, victim, states)


@njit(nogil=True)
def _add_page(a, slot, states):  # type: ignore[no-untyped-def]
    """A new last page for a sequence; -1: nothing can be evicted for it."""
    if a.scalars[NUM_FREE_PAGES] == 0:
        _evict(a, states)
        if a.scalars[NUM_FREE_PAGES] == 0:
            return -1
    a.scalars[NUM_FREE_PAGES] -= 1
    page = a.free_pages[a.scalars[NUM_FREE_PAGES]]
    tail = a.slot_tail[slot]
    a.page_prev[page] = tail
    a.page_next[page] = -1
    if tail >= 0:
        a.page_next[tail] = page
    else:
        a.slot_head[slot] = page
    a.slot_tail[slot] = page
    a.page_length[page] = 0
    a.page_output[page] = PAGE
    a.page_slot[page] = slot
    a.page_stamp[page] = a.scalars[CLOCK]
    a.page_use[page] = 1
    a.page_flags[page] = a.slot_flags[slot]
    a.slot_flags[slot] &= ~np.uint8(CUT)
    return page


@kernel
def append(a, slots, token_ids, begins, ends, num_prompt_tokens):  # type: ignore[no-untyped-def]
    """Adds text to sequences.

    Args:
        a: arrays.
        slots: int64 ``[n]``, open sequences; -1: none, the row is passed over.
        token_ids: int32 ``[n, >= max(ends)]``.
        begins: int64 ``[n]``, first column that is new.
        ends: int64 ``[n]``, one past the last.
        num_prompt_tokens: int64 ``[n]``, columns before this one are prompt.

    Returns:
        How many tokens found no room.
    """
    states = np.empty((_NUM_LEVELS, PAGE), np.uint64)
    num_buckets = np.uint64(a.table.shape[1] // BUCKET)
    lost = 0
    for row in range(slots.shape[0]):
        slot, column, end = slots[row], begins[row], ends[row]
        while slot >= 0 and column < end:
            page = a.slot_tail[slot]
            if page < 0 or a.page_length[page] == PAGE or a.slot_flags[slot] & CUT:
                page = _add_page(a, slot, states)
                if page < 0:
                    lost += end - column
                    break
            offset = a.page_length[page]
            count = min(PAGE - offset, end - column)
            for j in range(count):
                a.tokens[page * PAGE + offset + j] = token_ids[row, column + j]
            a.page_length[page] = offset + count
            first_output = offset + max(num_prompt_tokens[row] - column, 0)
            if first_output < offset + count:
                a.page_output[page] = min(a.page_output[page], first_output)
            known = _hash_page_contexts(a, page, offset, offset + count, states)
            for level in range(_NUM_LEVELS):
                for j in range(max(_LENGTHS[level] - known - 1, 0), count):
                    position = page * PAGE + offset + j
                    mixed = _mix(states[level, j])
                    a.older[level, position] = _put(
                        a.table[level], a.page_use, mixed, num_buckets, position
                    )
            a.scalars[NUM_TOKENS] += count
            a.scalars[CLOCK] += count
            column += count
    return lost


@kernel
def remove(a, slot):  # type: ignore[no-untyped-def]
    """Removes a sequence with all its tokens; returns how many they were."""
    states = np.empty((_NUM_LEVELS, PAGE), np.uint64)
    before = a.scalars[NUM_TOKENS]
    a.slot_open[slot] = True  # so that its slot is freed once, below
    while a.slot_tail[slot] >= 0:
        _free_page(a, a.slot_tail[slot], states)
    a.slot_open[slot] = False
    a.free_slots[a.scalars[NUM_FREE_SLOTS]] = slot
    a.scalars[NUM_FREE_SLOTS] += 1
    return before - a.scalars[NUM_TOKENS]


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
    states = np.empty(_NUM_LEVELS, np.uint64)
    state, power, num_levels = np.uint64(0), _ONE, 0
    for back in range(min(_LONGEST, length)):
        state += (np.uint64(text[length - 1 - back]) + _ONE) * power
        power *= _MULTIPLIER
        if back + 1 == _LENGTHS[num_levels]:
            states[num_levels] = state
            num_levels += 1
    for level in range(num_levels - 1, -1, -1):
        if level + 1 < _NUM_LEVELS and _LENGTHS[level + 1] <= min_match_len:
            return 0  # whatever is found from here on matches less
        count = 0
        position = _get(a.table[level], _mix(states[level]), num_buckets)
        for _ in range(_MOST_HOPS):
            if position < 0 or count == MOST_PLACES:
                break
            page = position // PAGE
            match = _match_len(a, position, text, length)
            if match < _LENGTHS[level]:
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
    expected,
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
        expected: float64 ``[n]``, sum of the path's probabilities, written.
        from_cluster: bool ``[n]``, most of the draft's weight was taught by others, written.
    """
    places = np.empty(MOST_PLACES, np.int64)
    place_weights = np.empty(MOST_PLACES, np.float64)
    matches = np.empty(MOST_PLACES, np.int64)
    for row in rows:
        lengths[row] = match_lens[row] = 0
        expected[row] = 0.0
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
            probability *= weight / total * matched / (matched + _DOUBT)
            if probability < floor:
                break
            drafts[row, index] = token
            lengths[row] = index + 1
            expected[row] += probability
            kept, taught = 0, 0.0
            for i in range(count):
                if a.tokens[places[i]] != token:
                    continue
                page = places[i] // PAGE
                if index == 0:
                    a.page_use[page] = min(a.page_use[page] + 1, _MOST_USE)
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
