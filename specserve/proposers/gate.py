"""How long drafts may be before verifying them costs more than it brings.

Each step maximises expected output tokens over expected time. With ``n`` requests, ``g`` the
draft tokens' chances of being accepted (all before them included) in falling order and the step's
cost linear in their number, the best set is a prefix of ``g``: the one with the greatest

    (n + g_1 + ... + g_m) / (base + m * per token)

and none at all where plain decoding makes more tokens a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.core.types import Draft
from specserve.proposers.acceptance import Acceptance
from specserve.proposers.step_cost import StepCost, size_of

LEAST_GAIN = 0.02
"""Drafts must promise this share of the plain rate more: below it noise decides."""

PROBE_SHARE = 0.01
"""Share of the time that may be spent on learning whether what is off would pay now."""

PROBE_HOPE = 0.5
"""Share of a probe's tokens that have to be expected to be accepted. Whether a draft is right is
seen without sending it; what is learned is whether verifying it still costs what it did."""

PROBE_TOKENS = 3
"""Length of a draft that is sent only to learn from it, at most."""

_FIRST_CREDIT, _MOST_CREDIT = 0.5, 4.0
_MOST_PROBE, _LEAST_PRICE = 1.0, 0.25
_PLAIN_PROBE_STEPS = 32
_FIRST_PLAIN_TURN, _PLAIN_TRIES = 4, 3
_PATIENCE_STEPS = 8
_FIRST_DRAFT_TOKENS = 4
_NO_TOKEN = 2.0


@dataclass(slots=True)
class _PlainTurns:
    """Plain steps of one size that are taken to know what they cost.

    Attributes:
        num_drafting: steps that would have had drafts.
        tries_left: plain steps to take until one could be measured.
    """

    num_drafting: int = 0
    tries_left: int = 0


class Gate:
    """Trims drafts to the length that pays, by what was accepted and what steps cost.

    Two things must be tried to be known: drafts where they seemed not to pay, and plain steps
    where drafts always pay. Both are paid from one account that earns ``PROBE_SHARE`` of the time,
    so that learning costs no more than that. Same calls, same answers: nothing is random.

    Attributes:
        acceptance: what was accepted of the sources' drafts.
        cost: of steps.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.cost = StepCost()
        self._credit = _FIRST_CREDIT  # in plain steps
        self._unmeasured_steps = 0
        self._steps_since_plain = 0
        self._plain_turns: dict[int, _PlainTurns] = {}
        self._skipped: dict[str, int] = {}

    def trim(self, request_ids: Sequence[str], drafts: list[Draft]) -> list[Draft]:
        """The drafts of one step, each cut to the length that pays; some to nothing.

        Args:
            request_ids: n ids.
            drafts: n, as the sources made them.

        Returns:
            n drafts.
        """
        self._credit = min(self._credit + PROBE_SHARE, _MOST_CREDIT)
        is_calibrated = self.cost.is_calibrated(len(drafts))
        self._unmeasured_steps = 0 if is_calibrated else self._unmeasured_steps + 1
        offered = [row for row, draft in enumerate(drafts) if draft.tokens]
        if not offered:
            return drafts
        gains = {
            row: self.acceptance.prefix_probabilities(request_ids[row], drafts[row])
            for row in offered
        }
        lengths = dict.fromkeys(offered, 0)
        if self.may_draft(len(drafts)):
            plain, base, per_token = self.cost.at(len(drafts))
            # In plain steps from here on: all decisions are about ratios.
            base, per_token = base / plain, per_token / plain
            least = self._least_gain(gains, len(drafts), base, per_token)
            if least is not None:
                lengths = {row: _num_at_least(gains[row], least) for row in offered}
                self._probe_drafts(request_ids, gains, lengths, base - 1, per_token, len(drafts))
        trimmed = list(drafts)
        for row in offered:
            trimmed[row] = drafts[row].cut(lengths[row])
        return trimmed

    def may_draft(self, num_requests: int) -> bool:
        """Not before plain steps of about so many requests were measured, unless none can be."""
        is_calibrated = self.cost.is_calibrated(num_requests)
        return is_calibrated or self._unmeasured_steps > _PATIENCE_STEPS

    def observe_step(self, num_requests: int, num_draft_tokens: int, seconds: float) -> None:
        """Learns what a step costs; see :meth:`ProposerChain.observe_step`."""
        self._steps_since_plain = self._steps_since_plain + 1 if num_draft_tokens else 0
        if not num_draft_tokens and (turns := self._plain_turns.get(size_of(num_requests))):
            turns.tries_left = 0
        self.cost.observe(num_requests, num_draft_tokens, seconds)

    def forget(self, request_ids: list[str]) -> None:
        """Drops what is kept of these requests."""
        self.acceptance.forget(request_ids)
        for request_id in request_ids:
            self._skipped.pop(request_id, None)

    def _least_gain(
        self, gains: dict[int, list[float]], num_requests: int, base: float, per_token: float
    ) -> float | None:
        """The chance of acceptance from which on a token is drafted; above 1: drafts do not pay.

        None: they do, and this step is to have none, to know what that costs.
        """
        falling = sorted((gain for row in gains.values() for gain in row), reverse=True)
        rate, least = best_rate(falling[: self._reach(num_requests)], num_requests, base, per_token)
        excess = rate / num_requests - 1
        if excess < LEAST_GAIN:
            return _NO_TOKEN
        if self._is_plain_turn(num_requests):
            return None
        if self._steps_since_plain >= _PLAIN_PROBE_STEPS and self._credit >= excess:
            self._credit -= excess
            self._steps_since_plain = 0
            return None
        return least

    def _is_plain_turn(self, num_requests: int) -> bool:
        """Of the steps of one size that would draft, the 4th, 8th, 16th, .. is a plain one.

        Few plain steps were measured when a size is new, and those perhaps while a drafter was
        still reading the prompts on the same cores.
        """
        turns = self._plain_turns.setdefault(size_of(num_requests), _PlainTurns())
        turns.num_drafting += 1
        if turns.num_drafting >= _FIRST_PLAIN_TURN and turns.num_drafting.bit_count() == 1:
            turns.tries_left = _PLAIN_TRIES
        turns.tries_left -= 1
        return turns.tries_left >= 0

    def _reach(self, num_requests: int) -> int | None:
        """Draft tokens that a step may have: at first few, so that a dear step is a short one."""
        if not self.cost.is_calibrated(num_requests):
            return None
        return max(2 * self.cost.most_draft_tokens, _FIRST_DRAFT_TOKENS)

    def _probe_drafts(
        self,
        request_ids: Sequence[str],
        gains: dict[int, list[float]],
        lengths: dict[int, int],
        first_price: float,
        per_token: float,
        num_requests: int,
    ) -> None:
        """Sends the beginnings of drafts that are likely to be right but seem to cost too much.

        All at once, as soon as there is credit for it: the more tokens a step has, the more it
        tells of what one costs. A probe is paid for what it costs beyond the plain steps that it is
        expected to save. Those that were left out for longest are first.
        """
        probes = {row: gains[row][:PROBE_TOKENS] for row in lengths if not lengths[row]}
        left_out = [row for row, probe in probes.items() if sum(probe) > PROBE_HOPE * len(probe)]
        skipped = self._skipped
        for row in left_out:
            skipped[request_ids[row]] = skipped.get(request_ids[row], 0) + 1
        price = paid = 0.0 if any(lengths.values()) else first_price
        chosen: list[int] = []
        for row in sorted(left_out, key=lambda row: -skipped[request_ids[row]]):
            cost = len(probes[row]) * per_token
            price += max(cost - sum(probes[row]) / num_requests, _LEAST_PRICE * cost)
            if chosen and price > _MOST_PROBE:
                break
            chosen.append(row)
            paid = price
        if chosen and paid <= self._credit:
            self._credit -= paid
            for row in chosen:
                lengths[row] = len(probes[row])
                skipped[request_ids[row]] = 0


def best_rate(
    falling: Sequence[float], num_requests: int, base: float, per_token: float
) -> tuple[float, float]:
    """The most output tokens a unit of time that a step with drafts can bring.

    Args:
        falling: chances of acceptance of the draft tokens that there are, falling.
        num_requests: each writes a token of its own.
        base: cost of the step but for draft tokens.
        per_token: cost of a draft token.

    Returns:
        (the rate, the least chance among the tokens that bring it); without any token
        ``(0, 2)``.
    """
    tokens, seconds, rate, least = float(num_requests), base, 0.0, _NO_TOKEN
    for gain in falling:
        tokens += gain
        seconds += per_token
        if tokens / seconds <= rate:
            break  # each further token brings less, and costs the same
        rate, least = tokens / seconds, gain
    return rate, least


def _num_at_least(falling: list[float], least: float) -> int:
    """How many of the falling numbers are at least ``least``."""
    count = 0
    for number in falling:
        if number < least:
            break
        count += 1
    return count
