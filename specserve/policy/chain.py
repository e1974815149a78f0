"""From sources to the drafts of one step: who is asked, whose draft is sent, and how much of it.

The way of a step, for the engine's hook::

    chain.open(slot, controls)                       a request begins
    outcomes = chain.observe(batch, new, verified)   after each step
    drafts = chain.step(batch, room)                 if chain.is_due(slots, num_steps)
    chain.observe_step(n, draft_tokens, seconds)     after each step of decoding requests alone
    chain.num_idle_steps(slots)                      so many steps of the same requests may pass
    chain.finish(batch)                              when requests end, if has_unseen_texts
    chain.close(slots)                               then, or when they are aborted
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import SourceConfig
from specserve.core.types import (
    DraftBatch,
    Float64Array,
    Int32Array,
    Int64Array,
    RequestControls,
)
from specserve.policy import cost, planner
from specserve.policy.acceptance import Acceptance
from specserve.policy.asking import (
    MOST_PAUSE,
    AlwaysAsk,
    AskPolicy,
    Exploration,
    LocalAsk,
    RemoteAsk,
    Situation,
)
from specserve.policy.cost import StepCost
from specserve.policy.planner import Costs, Plan, plan, probe
from specserve.sources.base import RemoteSource, Source, SourceContext
from specserve.sources.controls import wants_drafts
from specserve.sources.guard import GuardedSource
from specserve.sources.registry import build_source

logger = logging.getLogger(__name__)

_FIRST_TOKENS = 4
_PATIENCE_STEPS = 8
_SIGMAS = 3.0
"""A difference of costs of less than so many standard deviations is worth a measurement."""


class Member(NamedTuple):
    """A source of the chain.

    Attributes:
        kind: as configured.
        source: what drafts.
        labels: names of its drafts.
        max_draft_len: longest draft in tokens.
        dynamic: whether its drafts are cut to the length that pays, and it is asked where it pays.
        learns: whether it learns from one request for others: it has to see texts to their ends.
        needs_prediction: whether it drafts for requests with a prediction alone.
    """

    kind: str
    source: Source
    labels: tuple[str, ...]
    max_draft_len: int
    dynamic: bool = True
    learns: bool = False
    needs_prediction: bool = False


class Outcomes(NamedTuple):
    """What became of the last step's drafts, for n requests.

    Attributes:
        labels: int32 ``[n]``, index in :attr:`Chain.labels`; -1: no draft was verified.
        num_drafted: int32 ``[n]``, verified draft tokens.
        num_accepted: int32 ``[n]``, how many of them were accepted.
    """

    labels: Int32Array
    num_drafted: Int32Array
    num_accepted: Int32Array


class _Call(NamedTuple):
    """What asking a source brought: lengths asked for and drafted, int32 ``[n]``, and seconds."""

    source: int
    asked: Int32Array
    lengths: Int32Array
    seconds: float


class _Turns(NamedTuple):
    """A source with what decides about its turns."""

    member: Member
    guard: GuardedSource
    ask: AskPolicy
    first_label: int
    is_remote: bool


class Chain:
    """All sources of one replica, as one. Calls come from one thread.

    Args:
        members: the sources; of equally good drafts the first one's is sent.
        metrics: where drafts, calls and errors are counted.
        num_slots: requests that may be open at a time.
        vocab_size: draft tokens are 0 .. ``vocab_size - 1``; a draft with others is dropped.
        clock: monotonic seconds.

    Attributes:
        labels: names of all drafts.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        count, longest = len(members), max(each.max_draft_len for each in members)
        self._metrics = metrics
        self._clock = clock
        self._sources: list[_Turns] = []
        labels: list[str] = []
        # Remote sources are asked last, when it is known what the others have.
        remote = [isinstance(each.source, RemoteSource) for each in members]
        for is_remote, member in sorted(zip(remote, members, strict=True), key=itemgetter(0)):
            guard = GuardedSource(
                member.kind, member.source, metrics, vocab_size, len(member.labels), clock
            )
            ask = _ask_policy(member, guard, num_slots, is_remote)
            self._sources.append(_Turns(member, guard, ask, len(labels), is_remote))
            labels += member.labels
        self.labels = tuple(labels)
        self.cost = StepCost()
        self.sent: Int32Array = np.zeros((num_slots, longest), np.int32)
        self._sent_lengths = np.zeros(num_slots, np.int32)
        self._sent_labels = np.full(num_slots, -1, np.int32)
        self._fixed = np.array([not each.member.dynamic for each in self._sources])
        self._limits = np.zeros((count, num_slots), np.int32)
        self._acceptance = Acceptance(count, num_slots, longest)
        self._survival: Float64Array = np.zeros((count, num_slots, longest))
        self._unseen: Float64Array = np.zeros((num_slots, longest))
        self._lengths: Int32Array = np.zeros((count, num_slots), np.int32)
        self._labels = np.zeros((count, num_slots), np.int32)
        self._account = Exploration()
        self._step = self._unmeasured_steps = 0
        # Nothing is compiled while requests wait.
        self._acceptance.warm_up()
        planner.warm_up(self._survival, self._lengths, self._fixed)
        cost.warm_up()

    def open(self, slot: int, controls: RequestControls) -> None:
        """A request begins, in a slot that is free.

        Args:
            slot: below ``num_slots``.
            controls: what it asked for.
        """
        self._acceptance.open(slot, controls.tenant)
        self._sent_lengths[slot] = 0
        for index, (member, guard, *_) in enumerate(self._sources):
            has_needed = bool(controls.prediction) or not member.needs_prediction
            is_wanted = has_needed and wants_drafts(controls, member.kind)
            limit = member.max_draft_len if is_wanted else 0
            if controls.max_draft_tokens >= 0:
                limit = min(limit, controls.max_draft_tokens)
            self._limits[index, slot] = limit
            guard.open(slot, controls)

    def close(self, slots: Int64Array) -> None:
        """Drops all that is kept of these finished or aborted requests; their slots are free."""
        for each in self._sources:
            each.guard.close(slots)
            if isinstance(each.ask, RemoteAsk):
                each.ask.forget(slots)

    def observe(self, batch: DraftBatch, num_new: Int32Array, num_verified: Int32Array) -> Outcomes:
        """Counts what became of the last drafts, and learns from what was written.

        Args:
            batch: n requests.
            num_new: int32 ``[n]``, tokens that the step brought; 0: the request waits.
            num_verified: int32 ``[n]``, draft tokens that were verified in the step.
        """
        slots = batch.slots
        num_drafted = np.minimum(num_verified, self._sent_lengths[slots])
        num_drafted[num_new == 0] = 0
        is_verified = num_drafted > 0
        num_accepted = np.where(is_verified, num_new - 1, 0).astype(np.int32)
        labels = np.where(is_verified, self._sent_labels[slots], -1).astype(np.int32)
        if is_verified.any():
            counted = (each[is_verified] for each in (labels, num_drafted, num_accepted))
            self._metrics.count_drafts(self.labels, *counted)
        self._sent_lengths[slots[num_new > 0]] = 0
        self._acceptance.observe(slots, batch.token_ids, batch.num_tokens, num_new)
        return Outcomes(labels, num_drafted, num_accepted)

    def is_due(self, slots: Int64Array, num_steps: int = 1) -> bool:
        """Whether a source has a turn in this step.

        Args:
            slots: int64 ``[n]``, requests of this step.
            num_steps: since the last call of this method, with this one.
        """
        self._step += num_steps
        self._account.earn(self.cost.at(len(slots))[0], num_steps)
        return any(self._is_due(index, slots) for index in range(len(self._sources)))

    def num_idle_steps(self, slots: Int64Array) -> int:
        """Steps that may pass from here on without a word of them.

        Nothing is sent, nothing is to be learned from what was offered, and no source will be due.

        Args:
            slots: int64 ``[n]``, requests of this step; the next ones have to be of the same.
        """
        if self._acceptance.has_offers(slots):
            return 0
        asks = (
            each.ask.num_idle_steps(self._step, slots)
            for index, each in enumerate(self._sources)
            if each.guard.ready and self._is_of_use(index, slots)
        )
        return min(asks, default=MOST_PAUSE - 1)

    def step(self, batch: DraftBatch, room: Int32Array) -> list[list[int]]:
        """Drafts for the next step.

        Args:
            batch: n requests, of which the last step's outcomes were observed.
            room: int32 ``[n]``, longest draft that each can use now.

        Returns:
            n drafts, each at most ``room[i]`` long, often empty.
        """
        if not len(batch.slots):
            return []
        began = self._clock()
        self._acceptance.withdraw(batch.slots)
        costs = Costs(*self.cost.at(len(batch.slots)))
        calls = [
            call
            for index in range(len(self._sources))
            if (call := self._call(index, batch, room, costs)) is not None
        ]
        chosen = self._plan(batch.slots, costs)
        source, lengths = self._explored(chosen, costs)
        drafts = self._take(batch.slots, source, lengths)
        if logger.isEnabledFor(logging.DEBUG):
            self._explain(costs, calls, chosen, lengths)
        local = [call for call in calls if not self._sources[call.source].is_remote]
        overhead_s = self._clock() - began - sum(call.seconds for call in calls)
        for call in calls:
            share_s = 0.0 if self._sources[call.source].is_remote else overhead_s / len(local)
            gain_s = chosen.credits[call.source] / chosen.rate
            ask = self._sources[call.source].ask
            ask.observe(call.asked, call.lengths, call.seconds + share_s, gain_s)
        return drafts

    def observe_step(self, num_requests: int, num_draft_tokens: int, seconds: float) -> None:
        """What a step cost that decoded ``num_requests`` requests and did nothing else.

        Args:
            num_requests: each had one token and its draft scheduled.
            num_draft_tokens: verified in the step, of all requests together.
            seconds: from the end of the drafting before the step to the tokens that it sampled:
                scheduling and sampling are in it, drafting is not.
        """
        self.cost.observe(num_requests, num_draft_tokens, seconds)

    @property
    def has_unseen_texts(self) -> bool:
        """Whether a source that learns is asked seldom, and so may have missed the last tokens."""
        return any(each.member.learns and each.ask.is_slow for each in self._sources)

    def finish(self, batch: DraftBatch) -> None:
        """Shows requests that end to the sources that learn from them, as they are now."""
        for each in self._sources:
            if each.member.learns and each.guard.ready and len(batch.slots):
                each.guard.propose(batch, np.zeros(len(batch.slots), np.int32))

    def _explain(
        self, costs: Costs, calls: Sequence[_Call], chosen: Plan, lengths: Int32Array
    ) -> None:
        """Logs what a step was expected to cost, what was drafted, and what is sent of it."""
        drafted = {self._sources[each.source].member.kind: each.lengths.tolist() for each in calls}
        logger.debug(
            "a step: plain %.3g ms, with drafts %.3g ms and %.3g ms a token; drafted %s; sent %s; "
            "expected %.2f times the plain rate",
            *(1e3 * seconds for seconds in costs),
            drafted,
            lengths.tolist(),
            1 + chosen.gain,
        )

    def _is_due(self, index: int, slots: Int64Array) -> bool:
        turns = self._sources[index]
        is_due = turns.guard.ready and turns.ask.is_due(self._step, slots)
        return is_due and self._is_of_use(index, slots)

    def _is_of_use(self, index: int, slots: Int64Array) -> bool:
        """Whether these requests have what the source drafts from."""
        needs = self._sources[index].member.needs_prediction
        return not needs or bool(self._limits[index, slots].any())

    def _call(self, index: int, batch: DraftBatch, room: Int32Array, costs: Costs) -> _Call | None:
        """Asks a source, if it is due, and takes note of its drafts."""
        turns, slots = self._sources[index], batch.slots
        if not self._is_due(index, slots):
            return None
        limits = np.minimum(room, self._limits[index, slots])
        if isinstance(turns.ask, RemoteAsk):
            limits = self._remote_limits(index, turns.ask, batch, limits, costs)
            if not turns.guard.ready:  # it has just failed to say what reading takes
                return None
        began = self._clock()
        drafts = turns.guard.propose(batch, limits)
        if drafts is None:
            return None
        self._acceptance.offer(index, slots, drafts)
        self._labels[index, slots] = turns.first_label + drafts.labels
        return _Call(index, limits, drafts.lengths, self._clock() - began)

    def _remote_limits(
        self, index: int, ask: RemoteAsk, batch: DraftBatch, limits: Int32Array, costs: Costs
    ) -> Int32Array:
        """How long a draft to ask a remote source for, by what the others have offered."""
        if not self._is_calibrated(len(limits)):
            return np.zeros_like(limits)
        chosen = self._plan(batch.slots, costs)
        self._acceptance.unseen_survival(index, batch.slots, self._unseen)
        situation = Situation(self._step, batch, limits, chosen, costs, self._unseen)
        return ask.limits(situation, self._account)

    def _plan(self, slots: Int64Array, costs: Costs) -> Plan:
        """The best use of what was offered so far."""
        self._acceptance.survival(slots, self._survival, self._lengths)
        surplus = [
            each.ask.surplus_s if isinstance(each.ask, LocalAsk) else -inf for each in self._sources
        ]
        rank = sorted(range(len(surplus)), key=lambda index: -surplus[index])
        return plan(
            self._survival,
            self._lengths,
            len(slots),
            costs,
            rank=np.array(rank, np.int64),
            fixed=self._fixed,
            most_tokens=max(2 * self.cost.most_draft_tokens, _FIRST_TOKENS, len(slots)),
        )

    def _is_calibrated(self, num_requests: int) -> bool:
        """Whether plain steps of about so many requests were measured, or none can be."""
        is_measured = self.cost.is_calibrated(num_requests)
        return is_measured or self._unmeasured_steps > _PATIENCE_STEPS

    def _explored(self, chosen: Plan, costs: Costs) -> tuple[Int32Array, Int32Array]:
        """The plan, or what is done instead to learn what is not known well enough.

        A difference of costs on which the plan depends: whether a step with drafts is worth its
        time beyond a plain one. The better it is known, the less would come of it.

        Returns:
            For each request the source, -1: none, and the length of the draft that is sent.
        """
        size = len(chosen.source)
        self._unmeasured_steps += 1
        if self.cost.is_calibrated(size):
            self._unmeasured_steps = 0
        if not self._is_calibrated(size):
            return chosen.source, np.where(self._fixed[chosen.source], chosen.lengths, 0)
        if self._fixed.any():
            return chosen.source, chosen.lengths
        if num_tokens := chosen.num_draft_tokens:
            source, lengths = np.full_like(chosen.source, -1), np.zeros_like(chosen.lengths)
            loss_s = costs.plain * chosen.gain / (1 + chosen.gain)
        else:
            source, lengths, expected = probe(self._survival, self._lengths, size)
            num_tokens = int(lengths.sum())
            step_s = costs.base + costs.slope * num_tokens
            loss_s = step_s - costs.plain * (1 + expected / size)
        doubt_s = _SIGMAS * self.cost.doubt(size, num_tokens)
        if num_tokens and loss_s < doubt_s and self._account.spend(loss_s):
            return source, lengths
        return chosen.source, chosen.lengths

    def _take(self, slots: Int64Array, source: Int32Array, lengths: Int32Array) -> list[list[int]]:
        """Notes what is sent; the drafts as the engine takes them."""
        self._sent_lengths[slots] = lengths
        if not lengths.any():
            return [[] for _ in range(len(slots))]
        self._sent_labels[slots] = self._labels[source, slots]
        longest = int(lengths.max())
        taken = self._acceptance.tokens[source, slots, :longest]
        self.sent[slots, :longest] = taken
        pairs = zip(taken.tolist(), lengths.tolist(), strict=True)
        return [tokens[:length] for tokens, length in pairs]


def _ask_policy(member: Member, guard: GuardedSource, num_slots: int, is_remote: bool) -> AskPolicy:
    if not member.dynamic:
        return AlwaysAsk()
    return RemoteAsk(guard, num_slots) if is_remote else LocalAsk()


def build_chain(
    configs: Sequence[SourceConfig],
    metrics: SpeculationMetrics,
    context: SourceContext | None = None,
) -> Chain:
    """The chain that a configuration's ``speculation`` describes, warmed up."""
    context = context or SourceContext()
    members = [
        Member(
            config.kind,
            build_source(config, context),
            tuple(label.name for label in config.LABELS),
            config.max_draft_len,
            config.dynamic,
            config.LEARNS,
            config.NEEDS_PREDICTION,
        )
        for config in configs
    ]
    return Chain(members, metrics, num_slots=context.num_slots, vocab_size=context.vocab_size)
