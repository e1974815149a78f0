"""Asks all sources of a replica and chooses the drafts of each step.

The engine's hook calls, in this order::

    chain.open(slot, controls)                       when a request begins
    drafts = chain.draft_first(batch, n)             before the step that ends its prompt
    outcomes = chain.observe(batch, new, verified)   after each step
    chain.cost.observe(n, draft_tokens, seconds)     if the step only decoded the same requests
    drafts = chain.step(batch)                       drafts of the sources that are due
    chain.num_idle_steps(slots)                      number of next steps that need no call
    chain.finish(batch)                              when requests end
    chain.close(slots)                               when requests have ended or were aborted
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pkgutil import resolve_name

import numpy as np

from specserve.core.compile import direct
from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import SourceConfig
from specserve.core.types import (
    DraftBatch,
    Float64Array,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.policy.acceptance import Acceptance, unseen_survival
from specserve.policy.asking import MAX_ASK_INTERVAL, AskPolicy, LocalAskPolicy, RemoteAskPolicy
from specserve.policy.cost import StepCost, is_calibrated
from specserve.policy.planner import Costs, Plan
from specserve.policy.step import (
    LIMITS,
    MAX_OUTPUT,
    MIN_OUTPUT,
    NUM_SENT,
    Workspace,
    decide,
    observe,
    plan_step,
)
from specserve.sources.base import LearningSource, Member, RemoteSource, SourceContext
from specserve.sources.controls import wants_drafts
from specserve.sources.guard import GuardedSource

logger = logging.getLogger(__name__)

NO_LIMIT = 1 << 30
"""More tokens than any text has."""

_PATIENCE_STEPS = 8  # steps without calibration after which drafts are sent anyway


class Chain:
    """All sources of one replica with the policy of their use. Calls come from one thread.

    Args:
        members: the sources. Remote ones are moved to the end.
        metrics: counts drafts, calls and errors.
        num_slots: most requests that are open at a time.
        vocab_size: draft tokens are 0 .. ``vocab_size - 1``; a draft with others is dropped.
        max_len: longest text, in tokens.
        clock: monotonic seconds.

    Attributes:
        labels: draft labels of all sources.
        cost: of steps.
        sent: int32 ``[num_slots, k]``, the tokens of each request's last sent draft.
    """

    def __init__(
        self,
        members: Sequence[Member],
        metrics: SpeculationMetrics,
        *,
        num_slots: int,
        vocab_size: int = 2**31 - 1,
        max_len: int = NO_LIMIT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # Remote sources are asked last: their gain depends on the other sources' drafts.
        members = sorted(members, key=lambda each: isinstance(each.source, RemoteSource))
        count, longest = len(members), max(each.max_draft_len for each in members)
        self._clock, self._max_len, self._metrics = clock, max_len, metrics
        num_labels = [len(each.labels) for each in members]
        self._acceptance = Acceptance(num_labels, num_slots, longest, vocab_size)
        self._sources: list[AskPolicy] = []
        for place, each in enumerate(members):
            guard = GuardedSource(each, metrics, clock, self._acceptance.offers(place))
            if not each.dynamic:
                self._sources.append(AskPolicy(place, guard))
            elif isinstance(each.source, RemoteSource):
                self._sources.append(RemoteAskPolicy(place, guard, num_slots))
            else:
                self._sources.append(LocalAskPolicy(place, guard))
        self.labels = tuple(label for each in members for label in each.labels)
        self._usable: list[AskPolicy] = []  # the sources that can draft for a running request
        self._counts = metrics.draft_counts(self.labels)
        self.cost = StepCost()
        self.sent: Int32Array = np.zeros((num_slots, longest), np.int32)
        self._work = Workspace(
            requests=np.zeros((num_slots, LIMITS + count), np.int32),
            limits=np.zeros((count, num_slots), np.int32),
            survival=np.zeros((count, num_slots, longest)),
            lengths=np.zeros((count, num_slots), np.int32),
            rank=np.arange(count),
            surplus_s=np.full(count, -np.inf),
            fixed=np.array([not each.dynamic for each in members]),
            credit_s=np.full(1, np.inf),
            sent=self.sent,
            drafts=np.zeros(num_slots * longest, np.int32),
        )
        self._plan = Plan.empty(num_slots, count)
        self._unseen: Float64Array = np.zeros((num_slots, longest))
        self._step = self._num_unearned_steps = self._unmeasured_steps = self._num_offered = 0
        self._find_usable()
        batch, outcomes = DraftBatch.empty(), np.zeros((3, 0), np.int32)
        none, _, rows, _ = batch[:4]
        state, known, plan = self._acceptance.state, self._plan_inputs(none, 0), self._plan
        self._learn = direct(
            observe, state, self._work, self._counts, max_len, batch[:4], rows, rows, outcomes
        )
        self._plan_step = direct(plan_step, *known, state, self._work, plan)
        self._decide = direct(decide, *known, False, True, state, self._work, plan)
        self._is_calibrated = direct(is_calibrated, self.cost.lines, 1)
        self._predict_unseen = direct(unseen_survival, state, 0, none, self._unseen)

    def open(
        self,
        slot: int,
        controls: RequestControls,
        max_output: int = NO_LIMIT,
        min_output: int = 0,
        stops: Sequence[int] = (),
    ) -> None:
        """Registers a new request in a free slot.

        Args:
            slot: below ``num_slots``.
            controls: the request's options.
            max_output: most output tokens.
            min_output: output tokens before a stop token may end the request.
            stops: tokens that end the request.
        """
        self._acceptance.open(slot, controls.tenant, stops)
        request = self._work.requests[slot]
        request[MAX_OUTPUT] = min(max_output, NO_LIMIT)
        request[MIN_OUTPUT] = min(min_output, NO_LIMIT)
        request[NUM_SENT] = 0
        for each in self._sources:
            member = each.member
            is_able = not member.needs or bool(getattr(controls, member.needs))
            limit = member.max_draft_len if is_able and wants_drafts(controls, member.kind) else 0
            if controls.max_draft_tokens >= 0:
                limit = min(limit, controls.max_draft_tokens)
            request[LIMITS + each.place] = limit
            each.guard.call(member.source.open, slot, controls)
        self._find_usable()

    def close(self, slots: Int64Array) -> None:
        """Drops all state of these finished or aborted requests; their slots become free."""
        for each in self._sources:
            each.guard.call(each.member.source.close, slots)
            if isinstance(each, RemoteAskPolicy):
                each.forget(slots)
        self._work.requests[slots, LIMITS:] = 0
        self._find_usable()

    def observe(
        self, batch: DraftBatch, num_new: Int32Array, num_verified: Int32Array
    ) -> Int32Array:
        """Counts the accepted tokens of the last drafts, and learns from the new tokens.

        Args:
            batch: n requests.
            num_new: int32 ``[n]``, new tokens of the step; 0: the request waits.
            num_verified: int32 ``[n]``, draft tokens that the step verified.

        Returns:
            int32 ``[3, n]``: index in :attr:`labels` of the verified draft (-1: none); its tokens;
            its accepted tokens.
        """
        outcomes = np.empty((3, len(num_new)), np.int32)
        self._num_offered = self._learn(
            self._acceptance.state,
            self._work,
            self._counts,
            self._max_len,
            batch[:4],
            num_new,
            num_verified,
            outcomes,
        )
        return outcomes

    def num_idle_steps(self, slots: Int64Array) -> int:
        """Number of next steps for which :meth:`observe` and :meth:`step` need not be called.

        No source is due in them, and no offered draft waits for its outcome.

        Args:
            slots: int64 ``[n]``, requests of this step; the next steps must have the same ones.
        """
        if self._num_offered:
            return 0
        idle = (each.num_idle_steps(self._step, slots) for each in self._usable if each.guard.ready)
        return min(idle, default=MAX_ASK_INTERVAL - 1)

    def step(self, batch: DraftBatch, num_steps: int = 1) -> list[list[int]]:
        """Asks the sources that are due, and returns the drafts for the next step.

        Args:
            batch: n requests; :meth:`observe` was called with them before.
            num_steps: steps since the last call of this method, this one included.

        Returns:
            n drafts, none longer than its request can use now, often empty.
        """
        self._step += num_steps
        self._num_unearned_steps += num_steps
        return self._chosen(batch, len(batch.slots), self._usable, may_explore=True)

    def draft_first(self, batch: DraftBatch, num_requests: int) -> list[list[int]]:
        """Asks the local sources for the first drafts of new requests.

        The step that computes the end of the prompts verifies them. Call :meth:`observe` after it.

        Args:
            batch: n new requests, whose texts are their prompts.
            num_requests: number of requests in that step, at least n.

        Returns:
            As :meth:`step`.
        """
        one = np.ones(len(batch.slots), np.int32)
        self.observe(batch, one, np.zeros_like(one))  # as if the prompt's last token were new
        local = [each for each in self._usable if not isinstance(each, RemoteAskPolicy)]
        return self._chosen(batch, num_requests, local, may_explore=False)

    def _chosen(
        self,
        batch: DraftBatch,
        num_requests: int,
        sources: Sequence[AskPolicy],
        *,
        may_explore: bool,
    ) -> list[list[int]]:
        """The drafts of those sources that are due, in a step of ``num_requests`` requests."""
        began, slots = self._clock(), batch.slots
        size = len(slots)
        due = [each for each in sources if each.guard.ready and each.is_due(self._step, slots)]
        if not (due and size):
            return [[] for _ in range(size)]
        asked = [each for each in due if self._ask(each, batch, is_first=not may_explore)]
        costs, planned, num_sent, self._num_offered, is_measured = self._decide(
            *self._plan_inputs(slots, num_requests),
            self._unmeasured_steps >= _PATIENCE_STEPS,
            may_explore,
            self._acceptance.state,
            self._work,
            self._plan,
        )
        self._unmeasured_steps = 0 if is_measured else self._unmeasured_steps + 1
        drafts = self._drafts(size, num_sent)
        if logger.isEnabledFor(logging.DEBUG):
            self._explain(Costs(*costs), slots, planned[-1])
        self._observe_calls(asked, self._clock() - began, planned[1])
        return drafts

    def finish(self, batch: DraftBatch) -> None:
        """Shows the texts of ending requests to the sources that learn from them."""
        if len(batch.slots):
            for each in self._sources:
                if isinstance(source := each.member.source, LearningSource) and each.guard.ready:
                    each.guard.call(source.finish, batch)

    def _find_usable(self) -> None:
        limits = self._work.requests[:, LIMITS:]
        self._usable = [
            each for each in self._sources if not each.member.needs or limits[:, each.place].any()
        ]

    def _ask(self, ask: AskPolicy, batch: DraftBatch, *, is_first: bool) -> bool:
        """Asks a source, which writes its drafts into the offers; false if it fails.

        After a pause, and before first drafts, a local source has more to learn than in other
        steps. It would learn that later anyway, so the time does not count against its drafts.
        """
        slots, guard = batch.slots, ask.guard
        limits = self._work.limits[ask.place, : len(slots)]
        if not isinstance(ask, RemoteAskPolicy):
            learns_first = isinstance(ask, LocalAskPolicy) and (is_first or ask.is_slow)
            return guard.propose(batch, limits, learns_first=learns_first)
        limits = self._remote_limits(ask, batch, limits)
        if not (guard.ready and guard.propose(batch, limits)):  # `reading_s` may have failed
            return False
        ask.observe(limits, self._acceptance.state.offers.lengths[ask.place, slots], guard.call_s)
        return True

    def _remote_limits(
        self, ask: RemoteAskPolicy, batch: DraftBatch, limits: Int32Array
    ) -> Int32Array:
        """int32 ``[n]``: draft lengths to ask a remote source for, given the offered drafts."""
        slots, size = batch.slots, len(limits)
        is_patient = self._unmeasured_steps < _PATIENCE_STEPS
        is_too_early = is_patient and not self._is_calibrated(self.cost.lines, size)
        if is_too_early or not ask.is_considered(self._step):
            return np.zeros_like(limits)
        costs, (num_tokens, rate, _) = self._plan_step(
            *self._plan_inputs(slots, size), self._acceptance.state, self._work, self._plan
        )
        self._predict_unseen(self._acceptance.state, ask.place, slots, self._unseen)
        return ask.limits(
            self._step,
            batch,
            limits,
            self._plan.values[:size],
            rate,
            Costs(*costs),
            self._unseen,
            self._work.credit_s,
            is_drafting=num_tokens > 0,
        )

    def _plan_inputs(self, slots: Int64Array, num_requests: int) -> tuple[object, ...]:
        """First arguments of ``plan_step`` and ``decide``; each step is passed on only once."""
        num_steps, self._num_unearned_steps = self._num_unearned_steps, 0
        return self.cost.lines, slots, num_requests, num_steps

    def _drafts(self, size: int, num_tokens: int) -> list[list[int]]:
        """The sent drafts as lists of tokens, one for each request."""
        if not num_tokens:
            return [[] for _ in range(size)]
        tokens, drafts, begin = self._work.drafts[:num_tokens].tolist(), [], 0
        for length in self._plan.lengths[:size].tolist():
            drafts.append(tokens[begin : begin + length])
            begin += length
        return drafts

    def _observe_calls(self, asked: Sequence[AskPolicy], step_s: float, rate: float) -> None:
        """Counts invalid drafts, and tells local policies the time of their calls and decision."""
        calls_s = sum(ask.guard.call_s + ask.guard.learn_s for ask in asked)
        share_s = (step_s - calls_s) / max(len(asked), 1)
        num_invalid = self._acceptance.state.num_invalid
        for ask in asked:
            for _ in range(num_invalid[ask.place]):
                self._metrics.count_error(ask.member.kind)
            if isinstance(ask, LocalAskPolicy):
                ask.observe(ask.guard.call_s + share_s, self._plan.credits[ask.place] / rate)
                self._work.surplus_s[ask.place] = ask.surplus_s
        num_invalid[:] = 0

    def _explain(self, costs: Costs, slots: Int64Array, gain: float) -> None:
        """Logs a step's expected costs, drafted and sent tokens, and expected gain."""
        lengths = self._acceptance.state.offers.lengths[:, slots].tolist()
        logger.debug(
            "a step: plain %.3g ms, with drafts %.3g ms and %.3g ms a token; drafted %s; sent %s; "
            "expected %.2f times the plain rate",
            *(1e3 * seconds for seconds in costs),
            {ask.member.kind: lengths[ask.place] for ask in self._sources},
            self._plan.lengths[: len(slots)].tolist(),
            1 + gain,
        )


def build_chain(
    configs: Sequence[SourceConfig],
    metrics: SpeculationMetrics,
    context: SourceContext | None = None,
    max_len: int = NO_LIMIT,
    clock: Callable[[], float] = time.perf_counter,
) -> Chain:
    """Builds the chain of a configuration's ``speculation`` section, with its kernels compiled."""
    context = context or SourceContext()
    members = [
        Member(
            each.kind,
            resolve_name(each.SOURCE)(each, context),  # imported only now
            tuple(label.name for label in each.LABELS),
            each.max_draft_len,
            each.dynamic,
            each.NEEDS,
        )
        for each in configs
    ]
    return Chain(
        members,
        metrics,
        num_slots=context.num_slots,
        vocab_size=context.vocab_size,
        max_len=max_len,
        clock=clock,
    )
