"""The two compiled parts of a step: what became of its drafts, and what the next one sends.

Each is one call for the whole batch: at few requests nearly all of a step's time is calls.
"""

from __future__ import annotations

from typing import NamedTuple

from specserve.core.compile import inner, kernel
from specserve.core.types import BoolArray, Float64Array, Int32Array, Int64Array
from specserve.policy.acceptance import learn, survival_of
from specserve.policy.cost import costs_of, doubt_about, is_calibrated
from specserve.policy.planner import plan, probe

EXPLORED_SHARE = 0.01
"""Share of the time that may be spent on learning whether what is not done would pay now."""

_MOST_SAVED = 4.0
_ENOUGH = 2.0
_SIGMAS = 3.0
"""A difference of costs of less than so many standard deviations is worth a measurement."""

MOST_OUTPUT, LEAST_OUTPUT, NUM_SENT, SENT_LABEL, LIMITS = range(5)
"""Columns of ``Workspace.requests``: tokens that a request may write, and that it writes before
anything but its length may end it; its last draft that was sent; longest draft of each source."""


class Workspace(NamedTuple):
    """Arrays of a chain of S sources, for R request slots and drafts of at most k tokens.

    Attributes:
        requests: int32 ``[R, LIMITS + S]``.
        limits: int32 ``[S, R]``, by row of the step: the longest draft that is of use.
        survival: float64 ``[S, R, k]``, by row.
        lengths: int32 ``[S, R]``, by row.
        rank: int64 ``[S]``, scratch.
        surplus_s: float64 ``[S]``: the higher, the earlier a source is credited.
        fixed: bool ``[S]``, sources that are not dynamic.
        credit_s: float64 ``[1]``, the account, in seconds, for all that is done to learn from it
            alone. It begins with as much as can be saved up: what is met first is learned first.
        sent: int32 ``[R, k]``, by slot: the tokens of each request's last sent draft.
        drafts: int32 ``[R k]``, the tokens that are sent, one draft after the other.
    """

    requests: Int32Array
    limits: Int32Array
    survival: Float64Array
    lengths: Int32Array
    rank: Int64Array
    surplus_s: Float64Array
    fixed: BoolArray
    credit_s: Float64Array
    sent: Int32Array
    drafts: Int32Array


@kernel
def observe(a, work, num_drafts, max_len, batch, num_new, num_verified, outcomes):  # type: ignore[no-untyped-def]
    """Counts what became of the last drafts, learns from it, and says what is of use next.

    Args:
        a: the state of acceptance.
        work: the workspace.
        num_drafts: int64 ``[labels, 2, lengths]``, by number of tokens drafted, and accepted;
            updated.
        max_len: longest text, in tokens.
        batch: the arrays of a :class:`specserve.core.types.DraftBatch`.
        num_new: int32 ``[n]``, tokens that the step brought; 0: the request waits.
        num_verified: int32 ``[n]``, draft tokens that were verified in the step.
        outcomes: int32 ``[3, n]``, written: labels (-1: none), tokens drafted, and accepted.

    Returns:
        How many requests have offers left.
    """
    slots, token_ids, num_tokens, num_prompt_tokens = batch
    requests, limits = work.requests, work.limits
    for row in range(slots.shape[0]):
        slot, new = slots[row], num_new[row]
        num_drafted = min(num_verified[row], requests[slot, NUM_SENT]) if new > 0 else 0
        outcomes[0, row], outcomes[1, row], outcomes[2, row] = -1, 0, 0
        if num_drafted > 0:
            label, num_accepted = requests[slot, SENT_LABEL], min(new - 1, num_drafted)
            outcomes[0, row], outcomes[1, row], outcomes[2, row] = label, num_drafted, num_accepted
            num_drafts[label, 0, num_drafted] += 1
            num_drafts[label, 1, num_accepted] += 1
        room = 0
        if new > 0:
            requests[slot, NUM_SENT] = 0
            text, prompt = num_tokens[row], num_prompt_tokens[row]
            # One token more is always sampled after the draft, and it has to fit too.
            room = min(prompt + requests[slot, MOST_OUTPUT], max_len) - text - 1
            num_unstoppable = prompt + requests[slot, LEAST_OUTPUT] - text
            if num_unstoppable > 0:
                # vLLM lets the token after those stop the text where the draft's first one may.
                room = min(room, num_unstoppable - 1)
        for source in range(limits.shape[0]):
            limits[source, row] = max(min(room, requests[slot, LIMITS + source]), 0)
    return learn(a, slots, token_ids, num_tokens, num_new)


@kernel
def foresee(lines, slots, num_steps, most_tokens, a, work, found):  # type: ignore[no-untyped-def]
    """The best use of what was offered so far.

    Args:
        lines: of :class:`specserve.policy.cost.StepCost`.
        slots: int64 ``[n]``.
        num_steps: whose time is added to the account of exploration.
        most_tokens: draft tokens of the step at most.
        a: the state of acceptance.
        work: the workspace.
        found: a :class:`specserve.policy.planner.Plan`, written.

    Returns:
        (costs of the step; what :func:`specserve.policy.planner.plan` returns).
    """
    n = slots.shape[0]
    costs = costs_of(lines, n)
    earn(work.credit_s, costs[0], num_steps)
    survival_of(a, slots, work.limits, work.survival, work.lengths)
    _sort(work.surplus_s, work.rank)
    planned = plan(work.survival, work.lengths, n, costs, work.rank, work.fixed, most_tokens, found)
    return costs, planned


@kernel
def decide(lines, slots, num_steps, most_tokens, is_impatient, a, work, found):  # type: ignore[no-untyped-def]
    """What the step sends: as foreseen, or what is done instead to learn what is not known.

    Args:
        is_impatient: no plain steps are waited for that could be compared with; the others as of
            :func:`foresee`.

    Returns:
        (costs of the step; what the plan was; draft tokens that are sent; requests that something
        was offered to; whether plain steps of about so many requests were measured).
    """
    n = slots.shape[0]
    costs, planned = foresee(lines, slots, num_steps, most_tokens, a, work, found)
    is_known = is_calibrated(lines, n)
    if not (is_known or is_impatient):
        for row in range(n):
            if found.source[row] < 0 or not work.fixed[found.source[row]]:
                found.source[row], found.lengths[row] = -1, 0
    elif not work.fixed.any():
        _explore(work, lines, n, costs, planned, found)
    num_sent = _send(a, work, slots, found)
    num_offered = 0
    for source in range(work.lengths.shape[0]):
        for row in range(n):
            num_offered += work.lengths[source, row] > 0
    return costs, planned, num_sent, num_offered, is_known


@kernel
def earn(credit_s, step_s, num_steps):  # type: ignore[no-untyped-def]
    """Some steps of so many seconds each; four steps can be saved up for."""
    earned_s = credit_s[0] + num_steps * EXPLORED_SHARE * step_s
    credit_s[0] = min(earned_s, _MOST_SAVED * step_s)


@kernel
def affords(credit_s, price_s, step_s):  # type: ignore[no-untyped-def]
    """Whether there is enough for the price, or two steps are saved.

    What is missing is owed. So what is believed to be dearer than can be saved is tried, too: it is
    seldom, and whether it still is so dear is learned by nothing else.
    """
    return credit_s[0] >= min(price_s, _ENOUGH * step_s)


@kernel
def spend(credit_s, price_s, step_s):  # type: ignore[no-untyped-def]
    """Takes the price; false: it is not affordable."""
    if not affords(credit_s, price_s, step_s):
        return False
    credit_s[0] -= max(price_s, 0.0)
    return True


@inner
def _sort(surplus_s, rank):  # type: ignore[no-untyped-def]
    """The sources by falling surplus; of equal ones the first comes first."""
    for each in range(rank.shape[0]):
        place = each
        while place > 0 and surplus_s[rank[place - 1]] < surplus_s[each]:
            rank[place] = rank[place - 1]
            place -= 1
        rank[place] = each


@inner
def _explore(work, lines, n, costs, planned, found):  # type: ignore[no-untyped-def]
    """Takes a plain step, or sends some tokens, where it is worth seeing what that costs.

    A difference of costs on which the plan depends: whether a step with drafts is worth its time
    beyond a plain one. The better it is known, the less would come of it.
    """
    plain, base, slope = costs
    num_tokens, _, gain = planned
    is_plain = num_tokens > 0
    if is_plain:
        loss_s = plain * gain / (1.0 + gain)
    else:
        num_tokens, expected = probe(work.survival, work.lengths, n, found)
        loss_s = base + slope * num_tokens - plain * (1.0 + expected / max(n, 1))
    is_worth = num_tokens > 0 and loss_s < _SIGMAS * doubt_about(lines, n, num_tokens)
    if (is_worth and spend(work.credit_s, loss_s, plain)) == is_plain:
        found.source[:n], found.lengths[:n] = -1, 0


@inner
def _send(a, work, slots, found):  # type: ignore[no-untyped-def]
    """Notes what is sent; returns the number of draft tokens."""
    total = 0
    for row in range(slots.shape[0]):
        slot, source, length = slots[row], found.source[row], found.lengths[row]
        work.requests[slot, NUM_SENT] = length
        for j in range(length):
            work.sent[slot, j] = work.drafts[total + j] = a.tokens[source, slot, j]
        if length > 0:
            work.requests[slot, SENT_LABEL] = a.labels[source, slot]
        total += length
    return total
