"""From sources to the drafts of one step: who is asked, whose draft is taken, what is let through.

The way of a step, for the engine's hook::

    controls = parse_controls(...)                 once a request
    drafts = chain.step(batch, outcomes, controls) after each step; drafts[i] is for row i
    chain.observe_step(n, draft_tokens, seconds)   after each step of decoding requests alone
    chain.forget(ids)                              when requests finish or are aborted
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from specserve.core.config import SourceConfig
from specserve.core.metrics import SpeculationMetrics
from specserve.core.types import Draft, DraftBatch, Int32Array, Outcome, RequestControls
from specserve.proposers.base import Proposer
from specserve.proposers.gate import Gate
from specserve.proposers.guard import GuardedSource, is_well_formed
from specserve.proposers.registry import build_proposer

NO_DRAFT = Draft((), "ngram")
"""No source had a guess, or none that pays."""


class ProposerChain:
    """All sources of one replica, as one. Calls come from one thread.

    Args:
        sources: (kind, proposer), in the order in which they are asked.
        metrics: where drafts, calls and errors are counted.
        gate: trims drafts that do not pay; None lets all through.
        gated_kinds: the kinds whose drafts the gate trims.
        vocab_size: draft tokens are 0 .. ``vocab_size - 1``; a draft with others is dropped.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, Proposer]],
        metrics: SpeculationMetrics,
        *,
        gate: Gate | None = None,
        gated_kinds: frozenset[str] = frozenset(),
        vocab_size: int = 2**31 - 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kinds = tuple(kind for kind, _ in sources)
        self._sources = [GuardedSource(kind, source, metrics, clock) for kind, source in sources]
        self._metrics = metrics
        self._gate = gate
        self._gated_kinds = gated_kinds
        self._vocab_size = vocab_size

    def step(
        self, batch: DraftBatch, outcomes: list[Outcome], controls: Sequence[RequestControls]
    ) -> list[Draft]:
        """Learns from the last step, and drafts for the next.

        Args:
            batch: n requests that can use a draft now.
            outcomes: what became of the last step's drafts; any requests, in any order.
            controls: n, of the batch's requests.

        Returns:
            n drafts, each at most ``batch.max_draft_tokens[i]`` and
            ``controls[i].max_draft_tokens`` long, often empty.
        """
        assert len(controls) == len(batch)
        self.observe(outcomes)
        return self._first_draft(batch, controls)

    def observe(self, outcomes: list[Outcome]) -> None:
        """Counts the outcomes, and passes them to the sources and the gate."""
        if not outcomes:
            return
        for outcome in outcomes:
            draft = outcome.draft
            if draft is not None and draft.tokens:
                self._metrics.count_draft(draft.source, len(draft.tokens), outcome.num_accepted)
        for source in self._sources:
            source.observe(outcomes)
        if self._gate is not None:
            self._gate.observe(outcomes)

    def observe_step(self, num_requests: int, num_draft_tokens: int, seconds: float) -> None:
        """What a step cost that decoded ``num_requests`` requests and did nothing else.

        Args:
            num_requests: requests in the step; each had one token and its draft scheduled.
            num_draft_tokens: draft tokens verified in the step, of all requests together.
            seconds: from the end of the drafting before the step to the tokens that it sampled:
                scheduling and sampling are in it, drafting is not.
        """
        if self._gate is not None:
            self._gate.observe_step(num_requests, num_draft_tokens, seconds)

    def forget(self, request_ids: list[str]) -> None:
        """Drops all that is kept of these finished or aborted requests; unknown ids are fine."""
        for source in self._sources:
            source.forget(request_ids)
        if self._gate is not None:
            self._gate.forget(request_ids)

    def _first_draft(self, batch: DraftBatch, controls: Sequence[RequestControls]) -> list[Draft]:
        """The rule of choice: of the sources in their order, the first one that has a guess."""
        drafts = [NO_DRAFT] * len(batch)
        for source in self._sources:
            limits = self._limits(source.kind, batch, controls, drafts)
            if not source.ready or not limits.any():
                continue
            answer = source.propose(replace(batch, max_draft_tokens=limits))
            if answer is None:
                continue
            offers = [
                self._checked(source.kind, draft, limit)
                for draft, limit in zip(answer, limits.tolist(), strict=True)
            ]
            if self._gate is not None and source.kind in self._gated_kinds:
                offers = self._gate.trim(batch.request_ids, offers)
            for row, offer in enumerate(offers):
                if offer.tokens:
                    drafts[row] = offer
        return drafts

    @staticmethod
    def _limits(
        kind: str, batch: DraftBatch, controls: Sequence[RequestControls], drafts: list[Draft]
    ) -> Int32Array:
        """How long a draft each request takes from this source; 0 where it has one already."""
        limits = batch.max_draft_tokens.tolist()
        for row, control in enumerate(controls):
            if drafts[row].tokens or control.speculation not in ("auto", kind):
                limits[row] = 0
            elif 0 <= control.max_draft_tokens < limits[row]:
                limits[row] = control.max_draft_tokens
        return np.maximum(np.array(limits, np.int32), 0)

    def _checked(self, kind: str, draft: Draft, limit: int) -> Draft:
        """The draft, cut to the limit; dropped and counted if it is not made of tokens."""
        if not draft.tokens:
            return NO_DRAFT
        if not is_well_formed(draft, self._vocab_size):
            self._metrics.count_error(kind)
            return NO_DRAFT
        return draft if len(draft.tokens) <= limit else draft.cut(limit)


def build_chain(
    configs: Sequence[SourceConfig], metrics: SpeculationMetrics, *, vocab_size: int = 2**31 - 1
) -> ProposerChain:
    """The chain that a configuration's ``speculation`` describes, warmed up."""
    gated = frozenset(config.kind for config in configs if config.dynamic)
    return ProposerChain(
        [(config.kind, build_proposer(config)) for config in configs],
        metrics,
        gate=Gate() if gated else None,
        gated_kinds=gated,
        vocab_size=vocab_size,
    )
