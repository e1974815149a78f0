"""From sources to the drafts of one step: who is asked, whose draft is taken, what is let through.

The way of a step, for the engine's hook::

    controls = parse_controls(...)                 once a request
    due = chain.due(n)                             after each step
    drafts = chain.step(batch, outcomes, controls, due)    drafts[i] is for row i
    chain.observe(outcomes)                        instead of `step`, if no source is due
    chain.observe_step(n, draft_tokens, seconds)   after each step of decoding requests alone
    chain.num_idle_steps(ids)                      so many steps of the same requests may pass
    chain.finish(batch)                            when requests end, if has_unseen_texts
    chain.forget(ids)                              then, or when they are aborted
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

import numpy as np
from msgspec.structs import replace

from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import DrafterConfig, SourceConfig, source_sections
from specserve.core.types import Draft, DraftBatch, Int32Array, Outcome, RequestControls
from specserve.sources.acceptance import num_right
from specserve.sources.arbiter import Arbiter
from specserve.sources.ask_interval import AskInterval
from specserve.sources.ask_policy import AskPolicy
from specserve.sources.base import Proposer, SourceContext
from specserve.sources.gate import Gate
from specserve.sources.guard import GuardedSource, is_well_formed
from specserve.sources.registry import build_source

logger = logging.getLogger(__name__)

NO_DRAFT = Draft((), "ngram")
"""No source had a guess, or none that pays."""

_LEARNING_KINDS = frozenset(kind for kind, each in source_sections().items() if each.LEARNS)
"""Kinds of source that learn from one request for others: they must see texts to their ends."""

_KIND_OF = {label.name: kind for kind, each in source_sections().items() for label in each.LABELS}
"""The kind of source by its drafts' labels."""


def _kind_of(draft: Draft) -> str:
    return _KIND_OF.get(draft.source, draft.source)


class ProposerChain:
    """All sources of one replica, as one. Calls come from one thread.

    Args:
        sources: (kind, proposer); of equally promising drafts the first source's is taken.
        metrics: where drafts, calls and errors are counted.
        gated_kinds: the kinds whose drafts are trimmed to the length that pays.
        remote_kinds: the kinds whose answers take time, with the longest draft of each: they are
            asked last, and, if gated, only for what pays.
        vocab_size: draft tokens are 0 .. ``vocab_size - 1``; a draft with others is dropped.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, Proposer]],
        metrics: SpeculationMetrics,
        *,
        gated_kinds: frozenset[str] = frozenset(),
        remote_kinds: Mapping[str, int] | None = None,
        vocab_size: int = 2**31 - 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._remote_kinds = remote_kinds or {}
        self.kinds = tuple(kind for kind, _ in sources)
        self._sources = [
            GuardedSource(kind, source, metrics, clock)
            for kind, source in sorted(sources, key=lambda source: source[0] in self._remote_kinds)
        ]
        self._metrics = metrics
        self._gate = Gate()
        self._gated_kinds = gated_kinds
        self._vocab_size = vocab_size
        self._arbiter = Arbiter(self._gate.acceptance)
        self._policies = {
            kind: AskPolicy(kind, self._gate) for kind in gated_kinds & self._remote_kinds.keys()
        }
        self._intervals = {kind: AskInterval() for kind in gated_kinds - self._remote_kinds.keys()}
        self._clock = clock

    def num_idle_steps(self, request_ids: Sequence[str]) -> int:
        """Steps that may pass from here on without a word of them.

        Nothing is sent, nothing is to be learned from what was offered, and no source will be due.

        Args:
            request_ids: of this step; the next ones have to be of the same.
        """
        intervals = [self._intervals.get(source.kind) for source in self._sources if source.ready]
        if self._arbiter.has_offers(request_ids) or not intervals:
            return 0
        return min(0 if interval is None else interval.num_idle_steps for interval in intervals)

    def due(self, num_requests: int, num_steps: int = 1) -> frozenset[str]:
        """The kinds of source to ask in this step.

        A source that is down is among them when it may be tried again.

        Args:
            num_requests: in this step.
            num_steps: since the last call of this method, with this one.
        """
        seconds_per_token = self._gate.cost.plain(num_requests) / max(num_requests, 1)
        return frozenset(
            source.kind
            for source in self._sources
            if source.ready
            and (
                (interval := self._intervals.get(source.kind)) is None
                or interval.is_due(seconds_per_token, num_steps)
            )
        )

    def step(
        self,
        batch: DraftBatch,
        outcomes: list[Outcome],
        controls: Sequence[RequestControls],
        due: frozenset[str] | None = None,
    ) -> list[Draft]:
        """Learns from the last step, and drafts for the next.

        In a step for which no source is due, it is enough to :meth:`observe`.

        Args:
            batch: n requests that can use a draft now.
            outcomes: what became of the last step's drafts; any requests, in any order.
            controls: n, of the batch's requests.
            due: the step's answer of :meth:`due`, if it was asked for.

        Returns:
            n drafts, each at most ``batch.max_draft_tokens[i]`` and
            ``controls[i].max_draft_tokens`` long, often empty.
        """
        assert len(controls) == len(batch)
        began = self._clock()
        self.observe(outcomes)
        for request_id, control in zip(batch.request_ids, controls, strict=True):
            if control.tenant:
                self._gate.acceptance.assign(request_id, control.tenant)
        if len(batch):
            self._gate.cost.context = float(batch.num_tokens.mean())
        due = self.due(len(batch)) if due is None else due
        offers, seconds = self._offers(replace(batch, controls=tuple(controls)), due)
        sent = self._sent(batch.request_ids, offers)
        self._charge(seconds, self._clock() - began)
        return sent

    def observe(self, outcomes: list[Outcome]) -> None:
        """Counts the outcomes, and learns from them."""
        if not outcomes:
            return
        verified = [
            (each, each.draft) for each in outcomes if each.draft is not None and each.draft.tokens
        ]
        for outcome, draft in verified:
            self._metrics.count_draft(draft.source, len(draft.tokens), outcome.num_accepted)
        if verified and self._intervals:
            self._observe_gains(verified, len(outcomes))
        self._arbiter.observe(outcomes)

    def _observe_gains(self, verified: list[tuple[Outcome, Draft]], num_requests: int) -> None:
        """Tells the sources' intervals what their drafts brought, less what verifying them cost.

        What two sources drafted is credited to the one that is worth more: without the other it
        would have been sent all the same.
        """
        plain, base, per_token = self._gate.cost.at(num_requests)
        first, token_seconds = (base - plain) / len(verified), plain / num_requests
        worth = {
            kind: interval.worth(token_seconds)
            for kind, interval in self._intervals.items()
            if not interval.is_slow
        }
        for outcome, draft in verified:
            if not (interval := self._intervals.get(_kind_of(draft))):
                continue
            spent = (first + per_token * len(draft.tokens)) / token_seconds
            gain = outcome.num_accepted - spent
            rival, share = self._best_rival(outcome, draft, worth)
            if rival:
                self._intervals[rival].observe_gain(gain * share)
            interval.observe_gain(gain * (1 - share))

    def _best_rival(
        self, outcome: Outcome, draft: Draft, worth: Mapping[str, float]
    ) -> tuple[str, float]:
        """The source that is worth most of those that offered a draft, if another one than the sent
        draft's, and which share of that it had too; else none, and 0."""
        best, num_same = _kind_of(draft), 0
        for offer in self._arbiter.offers(outcome.request_id):
            kind = _kind_of(offer)
            if worth.get(kind, -inf) > worth.get(best, -inf):
                best, num_same = kind, num_right(offer, draft.tokens)
        if not num_same:
            return "", 0.0
        accepted = outcome.num_accepted
        return best, min(num_same / (accepted or len(draft.tokens)), 1.0)

    def observe_step(
        self, num_requests: int, num_draft_tokens: int, seconds: float, context: float = 0.0
    ) -> None:
        """What a step cost that decoded ``num_requests`` requests and did nothing else.

        Args:
            num_requests: requests in the step; each had one token and its draft scheduled.
            num_draft_tokens: draft tokens verified in the step, of all requests together.
            seconds: from the end of the drafting before the step to the tokens that it sampled:
                scheduling and sampling are in it, drafting is not.
            context: mean length of the requests' texts, in tokens.
        """
        self._gate.cost.context = context
        self._gate.observe_step(num_requests, num_draft_tokens, seconds)

    @property
    def has_unseen_texts(self) -> bool:
        """Whether a source that learns is asked seldom, and so may have missed the last tokens."""
        return any(
            interval.is_slow
            for kind, interval in self._intervals.items()
            if kind in _LEARNING_KINDS
        )

    def finish(self, batch: DraftBatch) -> None:
        """Shows requests that end to the sources that learn from them.

        Args:
            batch: the requests as they are now, all ``max_draft_tokens`` 0.
        """
        for source in self._sources:
            if source.kind in _LEARNING_KINDS and source.ready and len(batch):
                source.propose(batch)

    def forget(self, request_ids: list[str]) -> None:
        """Drops all that is kept of these finished or aborted requests; unknown ids are fine."""
        for source in self._sources:
            source.forget(request_ids)
        for policy in self._policies.values():
            policy.forget(request_ids)
        self._arbiter.forget(request_ids)
        self._gate.forget(request_ids)

    def _charge(self, seconds: Mapping[str, float], total: float) -> None:
        """Tells each source's interval what asking it took, with its part of the whole step's.

        Args:
            seconds: of asking each, by kind of source.
            total: of the step's drafting.
        """
        shared = total - sum(seconds.values())
        for kind, own in seconds.items():
            if interval := self._intervals.get(kind):
                interval.observe_call(own + shared / len(seconds))

    def _offers(
        self, batch: DraftBatch, due: frozenset[str]
    ) -> tuple[list[list[tuple[str, Draft]]], dict[str, float]]:
        """What these sources offer: for each request (kind, draft), drafts with tokens alone; and
        the seconds that it took to ask each, by kind.

        A source that is asked sees the whole batch, with a limit of 0 where no draft is wanted:
        some learn from what they see.
        """
        offers: list[list[tuple[str, Draft]]] = [[] for _ in batch.request_ids]
        calls: dict[str, float] = {}
        for source in self._sources:
            if source.kind not in due:
                continue
            turn_began, policy = self._clock(), self._policies.get(source.kind)
            limits = self._limits(source.kind, batch)
            if policy is not None:
                held = [[draft for _, draft in each] for each in offers]
                limits = np.minimum(limits, self._remote_kinds[source.kind])
                reading_s = partial(source.reading_s, batch)
                limits = policy.limits(batch.request_ids, limits, held, reading_s)
                if not source.ready:  # that failed
                    continue
            began = self._clock()
            drafts = self._ask(source, batch, limits)
            seconds = self._clock() - began
            if policy is not None:
                policy.observe_call(batch.request_ids, limits, drafts, seconds)
            calls[source.kind] = self._clock() - turn_began
            for each, draft in zip(offers, drafts, strict=True):
                if draft.tokens:
                    each.append((source.kind, draft))
        return offers, calls

    def _ask(self, source: GuardedSource, batch: DraftBatch, limits: Int32Array) -> list[Draft]:
        """A source's drafts, each with nothing but tokens and not beyond its limit."""
        answer = source.propose(replace(batch, max_draft_tokens=limits))
        if answer is None:
            return [NO_DRAFT] * len(batch)
        pairs = zip(answer, limits.tolist(), strict=True)
        return [self._checked(source.kind, draft, limit) for draft, limit in pairs]

    def _sent(self, request_ids: list[str], offers: list[list[tuple[str, Draft]]]) -> list[Draft]:
        """The rule of choice: each request's best draft, at the length that pays."""
        sent = [NO_DRAFT] * len(offers)
        gated = [NO_DRAFT] * len(offers)
        for row, each in enumerate(offers):
            if each:
                best = self._arbiter.choose(request_ids[row], [draft for _, draft in each])
                kind, draft = each[best]
                (gated if kind in self._gated_kinds else sent)[row] = draft
        for row, draft in enumerate(self._gate.trim(request_ids, gated)):
            if draft.tokens:
                sent[row] = draft
        if logger.isEnabledFor(logging.DEBUG):
            self._explain(request_ids, offers, sent)
        for row, each in enumerate(offers):
            self._arbiter.keep(request_ids[row], [draft for _, draft in each])
        return sent

    def _explain(
        self, request_ids: list[str], offers: list[list[tuple[str, Draft]]], sent: list[Draft]
    ) -> None:
        """Logs what was expected of each draft and of a step's cost, and what was sent."""
        costs = [1e3 * seconds for seconds in self._gate.cost.at(len(offers))]
        logger.debug("a step: plain %.3g ms, with drafts %.3g ms and %.3g ms a token", *costs)
        for request_id, each, draft in zip(request_ids, offers, sent, strict=True):
            told = "; ".join(
                f"{offer.source} {self._gate.acceptance.expected(request_id, offer):.2f} of "
                f"{len(offer.tokens)} tokens"
                for _, offer in each
            )
            logger.debug(
                "%s: expected %s; sent %d of %s",
                *(request_id, told or "nothing", len(draft.tokens), draft.source),
            )

    @staticmethod
    def _limits(kind: str, batch: DraftBatch) -> Int32Array:
        """How long a draft each request takes from this source."""
        limits = batch.max_draft_tokens.tolist()
        for row, control in enumerate(batch.controls):
            if control.speculation not in ("auto", kind):
                limits[row] = 0
            elif 0 <= control.max_draft_tokens < limits[row]:
                limits[row] = control.max_draft_tokens
        return np.maximum(np.array(limits, np.int32), 0)

    def _checked(self, kind: str, draft: Draft, limit: int) -> Draft:
        """The draft, cut to the limit; dropped and counted if it is not made of tokens."""
        if not draft.tokens or not limit:
            return NO_DRAFT
        if not is_well_formed(draft, self._vocab_size):
            self._metrics.count_error(kind)
            return NO_DRAFT
        return draft.cut(limit)


def build_chain(
    configs: Sequence[SourceConfig],
    metrics: SpeculationMetrics,
    context: SourceContext | None = None,
) -> ProposerChain:
    """The chain that a configuration's ``speculation`` describes, warmed up."""
    context = context or SourceContext()
    return ProposerChain(
        [(config.kind, build_source(config, context)) for config in configs],
        metrics,
        gated_kinds=frozenset(config.kind for config in configs if config.dynamic),
        remote_kinds={
            config.kind: config.max_draft_len
            for config in configs
            if isinstance(config, DrafterConfig)
        },
        vocab_size=context.vocab_size,
    )
