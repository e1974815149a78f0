"""Ask policies: in which steps a source is asked, by the time that its drafts save and cost."""

from __future__ import annotations

from typing import cast

import numpy as np

from specserve.core.backoff import Backoff
from specserve.core.compile import direct, kernel_array
from specserve.core.types import BoolArray, DraftBatch, Float64Array, Int32Array, Int64Array
from specserve.policy.cost import CallCost
from specserve.policy.planner import Costs, plan_call
from specserve.policy.step import affords, spend
from specserve.sources.base import RemoteSource
from specserve.sources.guard import GuardedSource

MAX_ASK_INTERVAL = 8
"""Longest interval in steps between two calls of a local source. It bounds the delay until a text
that starts to repeat itself is noticed."""

MAX_DECISION_INTERVAL = 32
"""Longest interval in steps between two decisions whether to ask a remote source. While it does not
pay, the interval doubles from ``MAX_ASK_INTERVAL``."""

MAX_PROBE_INTERVAL = 1024
"""Longest back-off in steps between two probes of a remote source. A probe also waits at most this
long for a text that the source follows."""

_MEAN_DECAY = 0.98  # weight of the old mean in a local source's moving means
_FIRST_CALLS = 8  # back-off starts at this call at the earliest
_MAX_CALL_RATIO = 4.0  # cap of one call's time, in mean calls
_MAX_TRIES = 8  # repeats of a probe without an answer
_AWAY_S = 1e-3  # a shorter call without drafts did not reach a drafter
_MAX_PROBED_VALUE = 0.9  # a probed request's draft is worth less, as a share of its limit


class AskPolicy:
    """Base of the ask policies. On its own, it asks in each step for all requests.

    Attributes:
        place: index of the source in all arrays.
        guard: catches the source's errors.
        member: the source.
        is_slow: whether the source is skipped in some steps.
    """

    is_slow = False

    def __init__(self, place: int, guard: GuardedSource) -> None:
        self.place, self.guard, self.member = place, guard, guard.member

    def num_idle_steps(self, step: int, slots: Int64Array) -> int:
        """Number of steps after this one, with the same requests, before the source is due."""
        return 0

    def is_due(self, step: int, slots: Int64Array) -> bool:
        """Whether the source is called in this step."""
        return self.num_idle_steps(step - 1, slots) == 0


class LocalAskPolicy(AskPolicy):
    """Asks a source in this process in each step while that saves time, else with back-off.

    Cost and gain of a call are moving means over about fifty calls. A stalled call
    counts as at most four mean ones. Sources in back-off share their steps, so that the steps
    between need no decision.
    """

    def __init__(self, place: int, guard: GuardedSource) -> None:
        super().__init__(place, guard)
        self.surplus_s = 0.0
        """Seconds that a call saves, less the seconds that it takes."""
        self._call_s = self._gain_s = 0.0
        self._num_calls = 0
        self._pause = 1

    def num_idle_steps(self, step: int, slots: Int64Array) -> int:
        """Number of steps before the source is due: at most 0, 1, 3 or 7, by the back-off."""
        return self._pause - 1 - step % self._pause

    def observe(self, call_s: float, gain_s: float) -> None:
        """Updates the means with one call, then the back-off.

        Args:
            call_s: seconds of the call and of its share of the decision.
            gain_s: seconds that its drafts are expected to save beyond sources ranked before it.
        """
        self._num_calls += 1
        weight = max(1 / self._num_calls, 1 - _MEAN_DECAY)
        if self._num_calls > 1:
            call_s = min(call_s, _MAX_CALL_RATIO * self._call_s)
        self._call_s += weight * (call_s - self._call_s)
        self._gain_s += weight * (gain_s - self._gain_s)
        self.surplus_s = self._gain_s - self._call_s
        pays = self.surplus_s >= 0 or self._num_calls < _FIRST_CALLS
        self._pause = 1 if pays else min(2 * self._pause, MAX_ASK_INTERVAL)
        self.is_slow = not pays


class RemoteAskPolicy(AskPolicy):
    """Asks a source in another process for those requests whose expected gain exceeds the cost.

    While asking does not pay, a probe asks for one request after each back-off, which doubles.
    """

    def __init__(self, place: int, guard: GuardedSource, num_slots: int) -> None:
        super().__init__(place, guard)
        self._source = cast(RemoteSource, guard.member.source)
        self._saved_s: Float64Array = np.zeros(num_slots)
        self._waits_s: Float64Array = np.zeros(num_slots)  # of the last decision, by row
        self._cost = CallCost()
        self._plain_s = np.inf  # seconds of a plain step when last asked
        self._pause = Backoff(1, MAX_PROBE_INTERVAL)
        self._step = self._num_tries = self._num_unwanted = 0
        self._probed = -1  # slot of the last probed request
        self._is_probe = False
        self._interval = MAX_ASK_INTERVAL
        self._waits_since: int | None = None  # step since which a probe waits for a followed text
        self.is_slow = True
        rows, some, three = np.zeros(0, np.int32), np.zeros(0), Costs(1.0, 1.0, 1.0)
        self._plan = direct(
            plan_call, some[None], rows, some, three, three[:], 1.0, False, some, some, rows
        )
        self._affords, self._spend = (direct(each, some, 1.0, 1.0) for each in (affords, spend))

    def num_idle_steps(self, step: int, slots: Int64Array) -> int:
        """0 if asking pays or the source must see the steps; else steps to the next decision."""
        if not self.is_slow or self._followed(slots).any():
            return 0
        return self._interval - 1 - step % self._interval

    def is_considered(self, step: int) -> bool:
        """Whether drafts may be asked for; in other steps the source only follows its texts."""
        return not self.is_slow or step % self._interval == 0

    def forget(self, slots: Int64Array) -> None:
        """Drops the state of requests that have ended."""
        self._saved_s[slots] = 0.0

    def limits(
        self,
        step: int,
        batch: DraftBatch,
        limits: Int32Array,
        values: Float64Array,
        rate: float,
        costs: Costs,
        unseen: Float64Array,
        credit_s: Float64Array,
        *,
        is_drafting: bool,
    ) -> Int32Array:
        """Lengths of the drafts to ask for: where they pay, else those of a probe.

        Args:
            step: number of the step.
            batch: n requests.
            limits: int32 ``[n]``, longest draft that each request can use.
            values: float64 ``[n]``, value in tokens of the drafts offered by other sources.
            rate: expected output tokens per second with those drafts.
            costs: of a step of n requests.
            unseen: float64 ``[>= n, k]``, see :func:`specserve.policy.acceptance.unseen_survival`.
            credit_s: float64 ``[1]``, the exploration budget; a probe is subtracted.
            is_drafting: whether the plan sends any of those drafts.

        Returns:
            int32 ``[n]``, draft length for each request; 0: none.
        """
        self._step, self._is_probe = step, False
        self._plain_s = costs.plain
        if not limits.any():  # briefly, or because no request wants drafts
            self._num_unwanted += 1
            self.is_slow = self.is_slow or self._num_unwanted >= MAX_ASK_INTERVAL
            return np.zeros_like(limits)
        self._num_unwanted = 0
        waits_s = self.guard.call(lambda: self._source.reading_s(batch))
        if waits_s is None:
            self.is_slow = True
            return np.zeros_like(limits)
        slots, self._waits_s = batch.slots, waits_s
        saved_s = self._saved_s[slots]
        asked = np.zeros_like(limits)
        surplus = self._plan(
            unseen,
            limits,
            values,
            costs,
            self._cost.coefficients(costs.plain),
            rate,
            is_drafting,
            kernel_array(waits_s, np.float64),
            saved_s,
            asked,
        )
        # A decision while the source reads a text keeps the last result: it drafts for it soon.
        is_reading = bool((np.isposinf(waits_s) & (limits > 0)).any())
        if surplus > 0 or not np.array_equal(saved_s, self._saved_s[slots]):
            self.is_slow = False
        elif not is_reading:
            self.is_slow = True
        self._saved_s[slots] = saved_s
        if asked.any():
            self._pause.reset()
            self._waits_since = None
        else:
            asked = self._probe(slots, limits, values, credit_s)
        # A followed text costs time in each step, and it may soon end. So a probe is not delayed.
        is_probing = asked.any() or is_reading or self._waits_since is not None
        longer = min(2 * self._interval, MAX_DECISION_INTERVAL)
        self._interval = longer if self.is_slow and not is_probing else MAX_ASK_INTERVAL
        return asked

    def observe(self, asked: Int32Array, lengths: Int32Array, call_s: float) -> None:
        """Updates the call cost and the probe back-off with one call of ``call_s`` seconds.

        ``asked`` and ``lengths``, int32 ``[n]``, are the requested and the received draft lengths.
        """
        if not asked.any():
            return
        answered = lengths > 0
        is_answered = bool(answered.any())
        if self._is_probe and (is_answered or self._num_tries >= _MAX_TRIES):
            self._pause.fail(self._step)
            self._num_tries = 0
        elif self._is_probe:  # a text that the source is still reading gets no draft: ask again
            self._num_tries += 1
        is_awaited = call_s >= _AWAY_S and bool((self._waits_s[asked > 0] == 0.0).any())
        if call_s <= 0 or not (is_answered or is_awaited):
            return  # no drafter was asked for a draft, so nothing was measured
        rows = answered if is_answered else asked > 0
        self._cost.observe(int(rows.sum()), int(asked[rows].max()), call_s, self._plain_s)

    def _probe(
        self, slots: Int64Array, limits: Int32Array, values: Float64Array, credit_s: Float64Array
    ) -> Int32Array:
        """Lengths to ask for in a probe of one request, if it is due and the budget affords it.

        Takes the request with the least valuable draft, of those that the source follows. If none
        is followed, the probe waits first; after ``MAX_PROBE_INTERVAL`` steps it takes any request.
        """
        waits_s, asked = self._waits_s, np.zeros_like(limits)
        if self._num_tries and np.isposinf(waits_s[slots == self._probed]).any():
            return asked  # the source still reads the probed text
        able = (waits_s < np.inf) & (values < _MAX_PROBED_VALUE * limits)
        if not self._pause.is_due(self._step) or not able.any():
            return asked
        call, request, token = self._cost.coefficients(self._plain_s)
        price_s = call + request + token * int(limits[able].max())
        if not self._affords(credit_s, price_s, self._plain_s):
            return asked
        if (followed := able & self._followed(slots)).any():
            able = followed
        elif self._waits_for_text():
            return asked
        row = int(np.where(able, values, np.inf).argmin())
        asked[row] = limits[row]
        self._probed = int(slots[row])
        if waits_s[row] == 0.0:  # else the source only reads the text
            self._spend(credit_s, price_s, self._plain_s)
        self._is_probe, self._waits_since = True, None
        return asked

    def _waits_for_text(self) -> bool:
        """Whether the probe is delayed until there is a text that the source follows."""
        if self._waits_since is None:
            self._waits_since = self._step
        is_late = self._step - self._waits_since >= MAX_PROBE_INTERVAL
        return not is_late and bool(self.guard.call(self._source.follow_next))

    def _followed(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``, see :meth:`RemoteSource.are_followed`; all false if the source fails."""
        seen = self.guard.call(lambda: self._source.are_followed(slots))
        return np.zeros(len(slots), np.bool_) if seen is None else seen
