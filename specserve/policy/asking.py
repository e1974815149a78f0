"""Which sources a step asks: those whose drafts bring more time than asking them takes."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from specserve.core.backoff import Backoff
from specserve.core.compile import direct, kernel_array
from specserve.core.types import BoolArray, DraftBatch, Float64Array, Int32Array, Int64Array
from specserve.policy.cost import CallCost
from specserve.policy.planner import Costs, plan_call
from specserve.policy.step import affords, spend
from specserve.sources.base import RemoteSource
from specserve.sources.guard import GuardedSource

MOST_PAUSE = 8
"""Steps from one call of a local source to the next where nothing comes of them: a text that begins
to repeat itself is noticed after so many steps at the latest."""

MOST_PROBE_PAUSE = 256
"""Steps between two probes of a remote source that nothing came of, and to wait at most for a text
to probe with of which it has missed nothing."""

_MEMORY = 0.98
_FIRST_CALLS = 8
_MOST_TIMES = 4.0
_MOST_TRIES = 8
_AWAY_S = 1e-3
_HOPE = 0.9


class Situation(NamedTuple):
    """What is known in a step when a remote source's turn comes.

    Attributes:
        step: its number.
        batch: n requests.
        limits: int32 ``[n]``, longest draft of the source that is of use.
        values: float64 ``[n]``, worth of the drafts that there are so far, in tokens.
        rate: expected tokens a second with these.
        is_drafting: whether the step sends some of them.
        costs: of a step of n requests.
        unseen: float64 ``[>= n, k]``, survival of the source's drafts, which are not there yet.
    """

    step: int
    batch: DraftBatch
    limits: Int32Array
    values: Float64Array
    rate: float
    is_drafting: bool
    costs: Costs
    unseen: Float64Array


class Ask:
    """When a source is asked, and for which requests. This one: in each step, for all.

    Attributes:
        place: index of the source in all arrays.
        guard: of the source.
        member: the source.
        is_slow: whether it is not asked in each step.
    """

    is_slow = False

    def __init__(self, place: int, guard: GuardedSource) -> None:
        self.place, self.guard, self.member = place, guard, guard.member

    def num_idle_steps(self, step: int, slots: Int64Array) -> int:
        """Steps after this one, of the same requests, in which the source will have no turn."""
        return 0

    def is_due(self, step: int, slots: Int64Array) -> bool:
        """Whether it has a turn in this step."""
        return self.num_idle_steps(step - 1, slots) == 0


class LocalAsk(Ask):
    """Asks a source in this process in each step while it pays, else ever less.

    What a call takes and brings are means over some fifty calls; a stalled one counts as four usual
    ones. Sources that are slow are asked in the same steps: those between cost nothing then.
    """

    def __init__(self, place: int, guard: GuardedSource) -> None:
        super().__init__(place, guard)
        self.surplus_s = 0.0
        """What a call brings less what it takes, in seconds."""
        self._call_s = self._gain_s = 0.0
        self._num_calls = 0
        self._pause = 1

    def num_idle_steps(self, step: int, slots: Int64Array) -> int:
        """Steps that come before the next turn: 0, 1, 3 or 7 at most."""
        return self._pause - 1 - step % self._pause

    def observe(self, call_s: float, gain_s: float) -> None:
        """What a call took and brought.

        Args:
            call_s: seconds of the call, with all that it brought along.
            gain_s: seconds that its drafts are expected to save beyond those ranked before it.
        """
        self._num_calls += 1
        weight = max(1 / self._num_calls, 1 - _MEMORY)
        if self._num_calls > 1:
            call_s = min(call_s, _MOST_TIMES * self._call_s)
        self._call_s += weight * (call_s - self._call_s)
        self._gain_s += weight * (gain_s - self._gain_s)
        self.surplus_s = self._gain_s - self._call_s
        pays = self.surplus_s >= 0 or self._num_calls < _FIRST_CALLS
        self._pause = 1 if pays else min(2 * self._pause, MOST_PAUSE)
        self.is_slow = not pays


class RemoteAsk(Ask):
    """Asks a source in another process for the requests that pay for the call.

    A source that is never asked cannot be learned from. So now and then one request is probed, the
    more seldom the longer nothing came of it.
    """

    def __init__(self, place: int, guard: GuardedSource, num_slots: int) -> None:
        super().__init__(place, guard)
        self._source = cast(RemoteSource, guard.member.source)
        self._saved_s: Float64Array = np.zeros(num_slots)
        self._cost = CallCost()
        self._plain_s = np.inf  # a plain step, by the last plan
        self._pause = Backoff(1, MOST_PROBE_PAUSE)
        self._step = self._tries = 0
        self._is_probe = False
        self._waits_since: int | None = None  # a probe is due since then, without a text for it
        self.is_slow = True
        rows, some, three = np.zeros(0, np.int32), np.zeros(0), Costs(1.0, 1.0, 1.0)
        self._plan = direct(
            plan_call, some[None], rows, some, three, three[:], 1.0, False, some, some, rows
        )
        self._affords, self._spend = (direct(each, some, 1.0, 1.0) for each in (affords, spend))

    def num_idle_steps(self, step: int, slots: Int64Array) -> int:
        """None where asking pays or the source would miss something; else every eighth has one."""
        if not self.is_slow or self._seen(slots).any():
            return 0
        return MOST_PAUSE - 1 - step % MOST_PAUSE

    def is_considered(self, step: int) -> bool:
        """Whether it may be asked in this step; in others it only sees what it must not miss."""
        return not self.is_slow or step % MOST_PAUSE == 0

    def forget(self, slots: Int64Array) -> None:
        """These requests have ended."""
        self._saved_s[slots] = 0.0

    def limits(self, situation: Situation, credit_s: Float64Array) -> Int32Array:
        """Which requests to ask for: those whose improvement pays for the call; else a probe.

        Args:
            situation: the step's.
            credit_s: float64 ``[1]``, pays for probes.

        Returns:
            int32 ``[n]``, how long a draft to ask for; 0: none.
        """
        self._step, self._is_probe, self.is_slow = situation.step, False, True
        limits, costs = situation.limits, situation.costs
        self._plain_s = costs.plain
        waits_s = self.guard.call(lambda: self._source.reading_s(situation.batch))
        if waits_s is None or not limits.any():
            return np.zeros_like(limits)
        slots = situation.batch.slots
        saved_s = self._saved_s[slots]
        asked = np.zeros_like(limits)
        surplus = self._plan(
            situation.unseen,
            limits,
            situation.values,
            costs,
            self._cost.coefficients(costs.plain),
            situation.rate,
            situation.is_drafting,
            kernel_array(waits_s, np.float64),
            saved_s,
            asked,
        )
        self.is_slow = surplus <= 0 and np.array_equal(saved_s, self._saved_s[slots])
        self._saved_s[slots] = saved_s
        if asked.any():
            self._pause.reset()
            self._waits_since = None
            return asked
        return self._probe(situation, waits_s, credit_s)

    def observe(self, asked: Int32Array, lengths: Int32Array, call_s: float) -> None:
        """A call for drafts of lengths ``asked``, int32 ``[n]``, brought those of ``lengths``."""
        if not asked.any():
            return
        answered = lengths > 0
        is_answered = bool(answered.any())
        if self._is_probe and (is_answered or self._tries >= _MOST_TRIES):
            self._pause.fail(self._step)
            self._tries = 0
        elif self._is_probe:  # a text that is just being read gets no draft: it is asked again
            self._tries += 1
        if call_s <= 0 or (call_s < _AWAY_S and not is_answered):
            return  # the source is away, and knows it
        rows = answered if is_answered else asked > 0
        self._cost.observe(int(rows.sum()), int(asked[rows].max()), call_s, self._plain_s)

    def _probe(
        self, situation: Situation, waits_s: Float64Array, credit_s: Float64Array
    ) -> Int32Array:
        """Asks for one request, when it is time and there is credit.

        For one that the source follows: of another it knows a part alone. Where there is none for
        long, for the one whose draft is worth least.
        """
        limits = situation.limits
        asked = np.zeros_like(limits)
        able = (waits_s < np.inf) & (situation.values < _HOPE * limits)
        if not self._pause.is_due(self._step) or not able.any():
            return asked
        call, request, token = self._cost.coefficients(situation.costs.plain)
        price_s = call + request + token * int(limits[able].max())
        if not self._affords(credit_s, price_s, situation.costs.plain):
            return asked
        if (followed := able & self._seen(situation.batch.slots)).any():
            able = followed
        elif self._waits():
            return asked
        row = int(np.where(able, situation.values, np.inf).argmin())
        asked[row] = limits[row]
        self._spend(credit_s, price_s, situation.costs.plain)
        self._is_probe, self._waits_since = True, None
        return asked

    def _waits(self) -> bool:
        """Whether the probe is put off until there is a text that the source follows."""
        if self._waits_since is None:
            self._waits_since = self._step
        is_late = self._step - self._waits_since >= MOST_PROBE_PAUSE
        return not is_late and bool(self.guard.call(self._source.follow_next))

    def _seen(self, slots: Int64Array) -> BoolArray:
        """bool ``[n]``, see :meth:`RemoteSource.must_see`."""
        seen = self.guard.call(lambda: self._source.must_see(slots))
        return np.zeros(len(slots), np.bool_) if seen is None else seen
