"""A source whose drafts come from a drafter, with its requests' texts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from specserve.core.metrics import HealthSnapshot, SpeculationMetrics
from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.core.types import DraftBatch, HiddenStates, Int32Array, RequestControls
from specserve.drafters.server import DrafterServer
from specserve.sources.base import SourceContext
from specserve.sources.remote import (
    DrafterClient,
)
from tests.drafters.fakes import VOCAB_SIZE, WAIT_S, FakeDrafter, draft_of
from tests.integration.cluster import eventually

HIDDEN_SIZE = 2
TEXT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 20_000).astype(np.int32)


class Replica:
    """A source with its requests' texts; what is drafted has to follow from them."""

    def __init__(self, find: Callable[[], str | None], kind: str = "draft_model", **options: Any):
        self.metrics = SpeculationMetrics((kind,))
        self.texts: dict[str, Int32Array] = {}
        context = SourceContext(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            metrics=self.metrics,
            find_drafter=lambda config: find,
        )
        options = {"max_draft_len": 3, "timeout_s": WAIT_S, "dynamic": False, **options}
        config: DraftModelConfig | MtpConfig
        if kind == "mtp":
            config = MtpConfig(kind="mtp", **options)
        else:
            config = DraftModelConfig(kind="draft_model", model="m", **options)
        self.proposer = DrafterClient.build(config, context)
        self.kind = kind

    def batch(
        self,
        *names: str,
        limit: int = 3,
        controls: tuple[RequestControls, ...] = (),
        hidden: HiddenStates | None = None,
    ) -> DraftBatch:
        texts = [self.texts[name] for name in names]
        lengths = np.array([len(text) for text in texts], np.int32)
        rows = np.zeros((len(texts), lengths.max() + 8), np.int32)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = text
        limits = np.full(len(names), limit, np.int32)
        return DraftBatch(list(names), rows, lengths, lengths, limits, controls, hidden)

    def propose(
        self,
        *names: str,
        limit: int = 3,
        controls: tuple[RequestControls, ...] = (),
        hidden: HiddenStates | None = None,
    ) -> list[tuple[int, ...]]:
        batch = self.batch(*names, limit=limit, controls=controls, hidden=hidden)
        drafts = self.proposer.propose(batch)
        self.chances = [draft.chances for draft in drafts]
        for name, draft in zip(names, drafts, strict=True):
            text = self.texts[name]
            assert draft.source == self.kind
            assert len(draft.tokens) <= limit
            assert draft.tokens == draft_of(text.tolist(), 3)[: len(draft.tokens)]
        return [draft.tokens for draft in drafts]

    def grow(self, name: str, end: int) -> None:
        self.texts[name] = TEXT[:end]

    def health(self) -> HealthSnapshot:
        (health,) = self.metrics.snapshot().health
        return health

    def until_up(self) -> None:
        eventually(lambda: self.proposer._link._monitor.peer, "a drafter", WAIT_S, 0.005)

    def until_drafts(self, *names: str) -> None:
        eventually(lambda: all(self.propose(*names)), "drafts", WAIT_S, 0.005)


class Place:
    """Where the drafter is, for replicas to find it."""

    def __init__(self) -> None:
        self.address: str | None = None

    def __call__(self) -> str | None:
        return self.address


def serve(stack: ExitStack, place: Place, drafter: FakeDrafter) -> DrafterServer:
    stack.callback(drafter.assert_called_rightly)
    server = stack.enter_context(closing(DrafterServer(drafter)))
    stack.callback(drafter.may_go.set)
    place.address = server.address
    return server


def replica(stack: ExitStack, place: Place, kind: str = "draft_model", **options: Any) -> Replica:
    made = Replica(place, kind, **options)
    stack.enter_context(closing(made.proposer))
    return made
