"""Drafts the continuation of a text: builds the trie's branch below its context.

A lookup takes the longest context that has places, and follows all of them at once. It compares
tokens, because a hash may collide and a page may have been evicted or overwritten. Requests are
looked up in groups, one place of each in turn: while memory for one is fetched, the others go on.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from specserve.core.compile import inner
from specserve.core.types import Float64Array, Int64Array
from specserve.trie.contexts import (
    LENGTHS,
    LONGEST,
    MULTIPLIER,
    NUM_LEVELS,
    ONE,
    mix,
    newest_place,
    prefetch,
    prefetch_context,
)
from specserve.trie.layout import (
    COLUMNS,
    CUT,
    FLAGS,
    FROM_CLUSTER,
    LENGTH,
    MAX_USE,
    NEXT,
    OWNER,
    PAGE,
    PREV,
    PRIVATE,
)
from specserve.trie.pages import open_slot

GROUP = 32
"""Requests of a group: their lookups take turns."""

_MAX_PLACES, _MAX_HOPS = 16, 128
"""Places of one context that a lookup weighs, and that it visits, at most. Other requests' private
texts are visited too."""

_HALF_EVIDENCE = 4.0
"""Evidence at which a token is right with probability 0.5. Evidence is ``r = sqrt(m^3 n)``, where
``n`` places match ``m`` tokens of context. If all places agree, the probability is ``r / (r + 4)``.
Seen on Python code: 0.4 after 2 tokens in one place, 0.8 after 6, 0.98 after 32."""
_MAX_MATCH = 32
_OWN_WEIGHT = 16.0
"""Factor for the request's own text; other texts have 1."""

LOCAL, CLUSTER = 0, 1
"""Labels of drafts: most of the first token's weight is from this replica's text, or others'."""


class Group(NamedTuple):
    """State of a group's lookups: arrays ``[GROUP]``, and ``[GROUP, 16]`` for places.

    Attributes:
        levels: index in ``LEVELS`` of the context length in use.
        hops: places visited at this level.
        positions: place to visit next.
        counts: number of valid places.
        owners: slot of the request's own sequence; -1 for none.
        active: indices of the requests that still search.
        newest: int64 ``[GROUP, levels]``, hash of each context, later its newest place or -1.
        places: position of the token that follows.
        ends: end of the tokens in that position's page.
        matches: number of context tokens that match.
        tokens: scratch.
        weights: weight of each place.
    """

    levels: Int64Array
    hops: Int64Array
    positions: Int64Array
    counts: Int64Array
    owners: Int64Array
    active: Int64Array
    newest: Int64Array
    places: Int64Array
    ends: Int64Array
    matches: Int64Array
    tokens: Int64Array
    weights: Float64Array

    @classmethod
    def empty(cls) -> Self:
        """Arrays of zeros."""
        return cls._make(
            [
                *np.zeros((6, GROUP), np.int64),
                np.zeros((GROUP, NUM_LEVELS), np.int64),
                *np.zeros((4, GROUP, _MAX_PLACES), np.int64),
                np.zeros((GROUP, _MAX_PLACES)),
            ]
        )


@inner
def _following(a, position):  # type: ignore[no-untyped-def]
    """Position of the next token of the text; -1 at its end and before a gap."""
    page = position // PAGE
    if position % PAGE + 1 < a.pages[page, LENGTH]:
        return position + 1
    after = np.int64(a.pages[page, NEXT])
    if position % PAGE + 1 == PAGE and after >= 0 and not a.pages[after, FLAGS] & CUT:
        return after * PAGE
    return -1


@inner
def _match_len(a, position, token_ids, row, length):  # type: ignore[no-untyped-def]
    """How many tokens up to ``position`` equal the last ones of ``token_ids[row, :length]``."""
    page = position // PAGE
    offset = position % PAGE
    if offset >= a.pages[page, LENGTH]:
        return 0
    longest = min(_MAX_MATCH, length)
    count = 0
    while count < longest and a.tokens[page * PAGE + offset] == token_ids[row, length - 1 - count]:
        count += 1
        offset -= 1
        if offset < 0:
            prev = np.int64(a.pages[page, PREV])
            if prev < 0 or a.pages[page, FLAGS] & CUT:
                break
            page, offset = prev, PAGE - 1
    return count


@inner
def _go_to(a, group, i, position):  # type: ignore[no-untyped-def]
    """Sets the place that request ``i`` visits next, and prefetches what the visit reads."""
    group.positions[i] = position
    prefetch(a.tokens, position)
    prefetch(a.tokens, max(position - LONGEST, 0))
    prefetch(a.older, position * NUM_LEVELS)
    prefetch(a.pages, position // PAGE * COLUMNS)


@inner
def _descend(a, group, i, lowest):  # type: ignore[no-untyped-def]
    """Moves request ``i`` to its next shorter context that has a place; False if there is none."""
    for level in range(group.levels[i] - 1, lowest - 1, -1):
        if group.newest[i, level] >= 0:
            group.levels[i], group.hops[i] = level, 0
            _go_to(a, group, i, group.newest[i, level])
            return True
    return False


@inner
def _hop(a, group, i, token_ids, row, length, lowest, min_match_len):  # type: ignore[no-untyped-def]
    """Visits one place of request ``i``; False if it has enough places, or none is left."""
    position, level, count = group.positions[i], group.levels[i], group.counts[i]
    page = position // PAGE
    match = _match_len(a, position, token_ids, row, length)
    is_valid = match >= LENGTHS[level]  # else the page was overwritten
    after = _following(a, position) if is_valid else -1
    if after >= 0:
        for j in range(count):
            if group.places[i, j] == after:
                is_valid = False  # a page was overwritten, so that the chain came back here
        is_own = a.pages[page, OWNER] == group.owners[i]
        is_seen = is_own or not a.pages[page, FLAGS] & PRIVATE
        if is_valid and match >= min_match_len and is_seen:
            group.places[i, count] = after
            group.ends[i, count] = after // PAGE * PAGE + a.pages[after // PAGE, LENGTH]
            group.weights[i, count] = match * (_OWN_WEIGHT if is_own else 1.0)
            group.matches[i, count] = match
            count += 1
            group.counts[i] = count
            prefetch(a.tokens, after + PAGE // 4)
    group.hops[i] += 1
    older = np.int64(a.older[position, level])
    if is_valid and older >= 0 and group.hops[i] < _MAX_HOPS and count < _MAX_PLACES:
        _go_to(a, group, i, older)
        return True
    return count == 0 and _descend(a, group, i, lowest)


@inner
def _gather(a, group, rows, texts, limits, sequences, min_match_len):  # type: ignore[no-untyped-def]
    """For each request, finds the places of its longest context that has any."""
    slots, token_ids, num_tokens = texts
    lowest = 0
    while lowest + 1 < NUM_LEVELS and LENGTHS[lowest + 1] <= min_match_len:
        lowest += 1  # a match of min_match_len tokens has a place at the next level too
    active, num_active = group.active, 0
    for i in range(rows.shape[0]):
        row = rows[i]
        group.counts[i] = 0
        if limits[row] <= 0:
            continue
        state, power, level = np.uint64(0), ONE, 0
        for back in range(min(LONGEST, num_tokens[row])):
            state += (np.uint64(token_ids[row, num_tokens[row] - 1 - back]) + ONE) * power
            power *= MULTIPLIER
            if back + 1 == LENGTHS[level]:
                mixed = mix(state)
                prefetch_context(a.table, level, mixed)
                group.newest[i, level] = mixed
                level += 1
        group.levels[i] = level
        group.owners[i] = open_slot(a, sequences[slots[row]])
        active[num_active] = i
        num_active += 1
    left = 0
    for k in range(num_active):
        i = active[k]
        for level in range(group.levels[i]):
            mixed = np.uint64(group.newest[i, level])
            group.newest[i, level] = newest_place(a.table, level, mixed)
        if _descend(a, group, i, lowest):
            active[left] = i
            left += 1
    while left:
        k = 0
        while k < left:
            i = active[k]
            row = rows[i]
            length = np.int64(num_tokens[row])
            if _hop(a, group, i, token_ids, row, length, lowest, min_match_len):
                k += 1
            else:
                left -= 1
                active[k] = active[left]


@inner
def _heaviest(tokens, weights, count):  # type: ignore[no-untyped-def]
    """The token with the most weight: (token, its weight, total weight, number of its places)."""
    total = 0.0
    is_one = True
    for i in range(count):
        total += weights[i]
        is_one = is_one and tokens[i] == tokens[0]
    if is_one:
        return tokens[0], total, total, count
    best, best_weight, num_best = tokens[0], 0.0, 0
    for i in range(count):
        weight, num = 0.0, 0
        for j in range(count):
            if tokens[j] == tokens[i]:
                weight += weights[j]
                num += 1
        if weight > best_weight:
            best, best_weight, num_best = tokens[i], weight, num
    return best, best_weight, total, num_best


@inner
def _draft(a, group, i, limit, floor, draft, confidence):  # type: ignore[no-untyped-def]
    """Writes request ``i``'s draft by following its places; returns (draft length, label)."""
    places, ends, weights = group.places[i], group.ends[i], group.weights[i]
    tokens = group.tokens[i]
    count, label = group.counts[i], LOCAL
    longest = 0
    for j in range(count):
        longest = max(longest, group.matches[i, j])
    probability = 1.0
    for index in range(limit):
        if not count:
            return index, label
        for j in range(count):
            tokens[j] = a.tokens[places[j]]
        token, weight, total, num_places = _heaviest(tokens, weights, count)
        evidence = np.sqrt(float(longest + index) ** 3 * num_places)
        chance = weight / total * evidence / (evidence + _HALF_EVIDENCE)
        probability *= chance
        if probability < floor:
            return index, label
        draft[index] = token
        confidence[index] = chance
        kept, cluster_weight = 0, 0.0
        for j in range(count):
            if tokens[j] != token:
                continue
            place, end = places[j] + 1, ends[j]
            if index == 0:
                page = places[j] // PAGE
                a.page_use[page] = min(a.page_use[page] + 1, MAX_USE)
                if a.pages[page, FLAGS] & FROM_CLUSTER:
                    cluster_weight += weights[j]
            if place == end:
                place = _following(a, place - 1)
                if place < 0:
                    continue
                end = place // PAGE * PAGE + a.pages[place // PAGE, LENGTH]
            places[kept], ends[kept], weights[kept] = place, end, weights[j]
            kept += 1
        if index == 0 and 2.0 * cluster_weight > weight:
            label = CLUSTER
        count = kept
    return limit, label


@inner
def lookup(  # type: ignore[no-untyped-def]
    a, group, rows, texts, limits, sequences, min_match_len, floor, drafts
):
    """Writes drafts for a batch, and counts a use of each page that a draft starts in.

    Args:
        group: scratch.
        texts: (slots, token_ids, num_tokens). The other arguments are those of
            :meth:`specserve.trie.token_trie.TokenTrie.step`.
    """
    for begin in range(0, rows.shape[0], GROUP):
        chosen = rows[begin : begin + GROUP]
        _gather(a, group, chosen, texts, limits, sequences, min_match_len)
        for i in range(chosen.shape[0]):
            slot, limit = texts[0][chosen[i]], limits[chosen[i]]
            drafts.lengths[slot], drafts.labels[slot] = _draft(
                a, group, i, limit, floor, drafts.tokens[slot], drafts.confidence[slot]
            )
