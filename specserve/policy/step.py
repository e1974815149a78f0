"""The two compiled parts of a step: learning from the last drafts, and choosing the next ones.

Each part is one call for the whole batch: in small batches, calls take most of the policy's time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from specserve.core.compile import inner, kernel
from specserve.core.types import BoolArray, Float64Array, Int32Array, Int64Array
from specserve.policy.acceptance import learn, survival_of
from specserve.policy.cost import cost_deviation, costs_of, is_calibrated
from specserve.policy.planner import plan, probe

EXPLORED_SHARE = 0.01
"""Share of the plain step time that exploration may use."""

_MAX_SAVED_STEPS, _SPENDABLE_STEPS = 4.0, 2.0
"""Upper bound of the exploration budget, and the budget that pays for any price; in plain steps."""

_SIGMAS = 3.0
"""Drafts' step cost is uncertain if exploration loses less than so many standard deviations."""

MAX_OUTPUT, MIN_OUTPUT, NUM_SENT, SENT_LABEL, LIMITS = range(5)
"""Columns of ``Workspace.requests``: most output tokens; output tokens before a stop token may end
the request; length and label of its last sent draft; then each source's longest draft."""


class Workspace(NamedTuple):
    """Arrays of a chain of S sources, for R request slots and drafts of at most k tokens.

    Attributes:
        requests: int32 ``[R, LIMITS + S]``.
        limits: int32 ``[S, R]``, by batch row: longest draft that the request can use.
        survival: float64 ``[S, R, k]``, by batch row, see :func:`survival_of`.
        lengths: int32 ``[S, R]``, by batch row: tokens of each offered draft.
        rank: int64 ``[S]``, sources by falling surplus.
        surplus_s: float64 ``[S]``, seconds that a call of each source saves beyond its own time.
        fixed: bool ``[S]``, sources with ``dynamic: false``.
        credit_s: float64 ``[1]``, the exploration budget in seconds. It starts at its upper bound.
        sent: int32 ``[R, k]``, by slot: the tokens of each request's last sent draft.
        drafts: int32 ``[R k]``, the tokens of all sent drafts, by batch row.
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
    """Counts accepted draft tokens, updates acceptance, and writes the limits of the next drafts.

    Args:
        a: the acceptance state.
        work: the workspace.
        num_drafts: int64 ``[labels, 2, lengths]``, updated: number of drafts by drafted tokens and
            by accepted tokens.
        max_len: longest text, in tokens.
        batch: the arrays of a :class:`specserve.core.types.DraftBatch`.
        num_new: int32 ``[n]``, new tokens of the last step; 0: the request waits.
        num_verified: int32 ``[n]``, draft tokens that the step verified.
        outcomes: int32 ``[3, n]``, written: label (-1: none), drafted tokens, accepted tokens.

    Returns:
        Number of offered drafts whose outcome is not known yet.
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
            # The target samples one more token after the draft. It must fit, too.
            room = min(prompt + requests[slot, MAX_OUTPUT], max_len) - text - 1
            num_until_stop = prompt + requests[slot, MIN_OUTPUT] - text
            if num_until_stop > 0:
                # vLLM masks stop tokens after a draft if it masks them at the draft's first token.
                # So the token after the draft must be one that cannot stop either.
                room = min(room, num_until_stop - 1)
        for source in range(limits.shape[0]):
            limits[source, row] = max(min(room, requests[slot, LIMITS + source]), 0)
    return learn(a, slots, token_ids, num_tokens, num_new)


@kernel
def plan_step(lines, slots, num_requests, num_steps, a, work, found):  # type: ignore[no-untyped-def]
    """Plans the step with the drafts offered so far, and updates the exploration budget.

    Args:
        lines: of :class:`specserve.policy.cost.StepCost`.
        slots: int64 ``[n]``.
        num_requests: number of requests in the step, see :func:`specserve.policy.planner.plan`.
        num_steps: steps since the last call; a share of their time is added to the budget.
        a: the acceptance state.
        work: the workspace.
        found: a :class:`specserve.policy.planner.Plan`, written.

    Returns:
        (costs of the step; the result of :func:`specserve.policy.planner.plan`).
    """
    n = slots.shape[0]
    costs = costs_of(lines, num_requests)
    earn(work.credit_s, costs[0], num_steps)
    survival_of(a, slots, work.limits, work.survival, work.lengths)
    _sort(work.surplus_s, work.rank)
    planned = plan(
        work.survival, work.lengths, n, num_requests, costs, work.rank, work.fixed, found
    )
    return costs, planned


@kernel
def decide(lines, slots, num_requests, num_steps, is_impatient, may_explore, a, work, found):  # type: ignore[no-untyped-def]
    """Chooses the step's drafts: those of the plan, none during calibration, or an exploration.

    Args:
        is_impatient: whether drafts are sent although calibration is not complete.
        may_explore: whether the step's time will be measured. The other arguments are those of
            :func:`plan_step`.

    Returns:
        (costs of the step; the plan's result; number of draft tokens that are sent; number of
        offered drafts; whether plain steps of about this batch size were measured).
    """
    n = slots.shape[0]
    costs, planned = plan_step(lines, slots, num_requests, num_steps, a, work, found)
    is_known = is_calibrated(lines, num_requests)
    if not (is_known or is_impatient):
        for row in range(n):
            if found.source[row] < 0 or not work.fixed[found.source[row]]:
                found.source[row], found.lengths[row] = -1, 0
    elif may_explore and not work.fixed.any():
        _explore(work, lines, n, costs, planned, found)
    num_sent = _send(a, work, slots, found)
    num_offered = 0
    for source in range(work.lengths.shape[0]):
        for row in range(n):
            num_offered += work.lengths[source, row] > 0
    return costs, planned, num_sent, num_offered, is_known


@kernel
def earn(credit_s, step_s, num_steps):  # type: ignore[no-untyped-def]
    """Adds 1 % of ``num_steps`` steps of ``step_s`` seconds to the budget, up to four steps."""
    earned_s = credit_s[0] + num_steps * EXPLORED_SHARE * step_s
    credit_s[0] = min(earned_s, _MAX_SAVED_STEPS * step_s)


@kernel
def affords(credit_s, price_s, step_s):  # type: ignore[no-untyped-def]
    """Whether the budget covers the price, or holds two steps; then it may become negative.

    Only a trial can show whether a high price still holds. So even a price above the upper bound of
    the budget is paid sometimes.
    """
    return credit_s[0] >= min(price_s, _SPENDABLE_STEPS * step_s)


@kernel
def spend(credit_s, price_s, step_s):  # type: ignore[no-untyped-def]
    """Subtracts the price from the budget; returns false if the budget does not afford it."""
    if not affords(credit_s, price_s, step_s):
        return False
    credit_s[0] -= max(price_s, 0.0)
    return True


@inner
def _sort(surplus_s, rank):  # type: ignore[no-untyped-def]
    """Writes the sources into ``rank`` by falling surplus, equal ones by index."""
    for each in range(rank.shape[0]):
        place = each
        while place > 0 and surplus_s[rank[place - 1]] < surplus_s[each]:
            rank[place] = rank[place - 1]
            place -= 1
        rank[place] = each


@inner
def _explore(work, lines, n, costs, planned, found):  # type: ignore[no-untyped-def]
    """Makes a step with drafts plain, or sends short drafts, to measure what drafts cost.

    The plan depends on what drafts add to a step's cost. This is measured while it is uncertain,
    compared with the time that the measurement is expected to lose. Short drafts are also sent
    whenever the budget has been saved, because a stalled step may have left a cost too high.
    """
    plain, base, slope = costs
    num_tokens, _, gain = planned
    is_plain = num_tokens > 0
    if is_plain:
        loss_s = plain * gain / (1.0 + gain)
    else:
        num_tokens, expected = probe(work.survival, work.lengths, n, found)
        loss_s = base + slope * num_tokens - plain * (1.0 + expected / max(n, 1))
    pays_any_price = not is_plain and affords(work.credit_s, math.inf, plain)
    is_worth = num_tokens > 0 and (
        pays_any_price or loss_s < _SIGMAS * cost_deviation(lines, n, num_tokens)
    )
    if (is_worth and spend(work.credit_s, loss_s, plain)) == is_plain:
        found.source[:n], found.lengths[:n] = -1, 0


@inner
def _send(a, work, slots, found):  # type: ignore[no-untyped-def]
    """Writes the sent drafts into the workspace; returns the number of draft tokens."""
    total = 0
    for row in range(slots.shape[0]):
        slot, source, length = slots[row], found.source[row], found.lengths[row]
        work.requests[slot, NUM_SENT] = length
        for j in range(length):
            work.sent[slot, j] = work.drafts[total + j] = a.offers.tokens[source, slot, j]
        if length > 0:
            label = a.first_labels[source] + a.offers.labels[source, slot]
            work.requests[slot, SENT_LABEL] = label
        total += length
    return total
