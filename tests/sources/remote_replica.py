"""A remote source with its requests' texts, and a place to serve its drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from specserve.core.metrics import HealthSnapshot, SpeculationMetrics
from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.core.types import (
    DraftBatch,
    HiddenStates,
    Int32Array,
    Int64Array,
    RequestControls,
    UInt16Array,
)
from specserve.drafters.server import DrafterServer
from specserve.sources.base import SourceContext
from specserve.sources.remote import DrafterClient
from tests.draft_batches import propose
from tests.drafters.fakes import VOCAB_SIZE, WAIT_S, FakeDrafter, draft_of
from tests.integration.cluster import eventually

HIDDEN_SIZE = 2
NUM_SLOTS = 16
TEXT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 20_000).astype(np.int32)


class Replica:
    """A remote source with its requests' texts. It checks each draft against its text.

    A request is opened at its first step, with the ``controls`` under its name.
    """

    def __init__(self, find: Callable[[], str | None], kind: str = "draft_model", **options: Any):
        self.metrics = SpeculationMetrics((kind,))
        self.texts: dict[str, Int32Array] = {}
        self.controls: dict[str, RequestControls] = {}
        self.slots: dict[str, int] = {}
        context = SourceContext(
            num_slots=NUM_SLOTS,
            vocab_size=VOCAB_SIZE,
            tokenizer="the target's",
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
        self.source = DrafterClient(config, context)

    def slots_of(self, *names: str) -> Int64Array:
        """The requests' slots; new requests are opened."""
        for name in names:
            if name not in self.slots:
                slot = min(set(range(NUM_SLOTS)) - set(self.slots.values()))
                self.slots[name] = slot
                self.source.open(slot, self.controls.get(name, RequestControls()))
        return np.array([self.slots[name] for name in names])

    def batch(self, *names: str, hidden: HiddenStates | None = None) -> DraftBatch:
        """The batch of a step with these requests."""
        texts = [self.texts[name] for name in names]
        lengths = np.array([len(text) for text in texts], np.int32)
        rows = np.zeros((len(texts), lengths.max() + 8), np.int32)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = text
        return DraftBatch(self.slots_of(*names), rows, lengths, lengths, hidden)

    def propose(
        self, *names: str, limit: int = 3, hidden: HiddenStates | None = None
    ) -> list[list[int]]:
        """Runs a step and checks that each draft fits its text."""
        limits = np.full(len(names), limit, np.int32)
        drafts = propose(self.source, self.batch(*names, hidden=hidden), limits)
        self.confidence = drafts.confidence
        assert not drafts.labels.any()
        assert (drafts.lengths <= limit).all()
        found = [
            tokens[:length].tolist()
            for tokens, length in zip(drafts.tokens, drafts.lengths, strict=True)
        ]
        for name, tokens in zip(names, found, strict=True):
            assert tokens == list(draft_of(self.texts[name].tolist(), 3))[: len(tokens)]
        return found

    def reading_s(self, *names: str) -> list[float]:
        """The source's ``reading_s`` of these requests."""
        return self.source.reading_s(self.batch(*names)).tolist()  # type: ignore[no-any-return]

    def grow(self, name: str, end: int) -> None:
        """Sets the request's text to the first ``end`` tokens of ``TEXT``."""
        self.texts[name] = TEXT[:end]

    def close(self, *names: str) -> None:
        """Closes these requests."""
        self.source.close(np.array([self.slots.pop(name) for name in names]))

    def health(self) -> HealthSnapshot:
        """Health of the source."""
        (health,) = self.metrics.snapshot().health
        return health

    def until_up(self) -> None:
        """Waits until the drafter is up."""
        eventually(lambda: self.source._monitor.peer, "a drafter", WAIT_S, 0.005)

    def until_drafts(self, *names: str) -> None:
        """Runs steps until all of these requests have drafts."""
        eventually(lambda: all(self.propose(*names)), "drafts", WAIT_S, 0.005)


def hidden_states(values: Sequence[UInt16Array], starts: Sequence[int]) -> HiddenStates:
    """Hidden states of a step as an engine passes them; ``values[i]`` are those of row i."""
    return HiddenStates(
        lambda rows: lambda: np.concatenate([values[row] for row in rows]),
        np.array([len(each) for each in values], np.int32),
        np.array(starts, np.int32),
    )


class Place:
    """The drafter's address, for replicas to find it."""

    def __init__(self) -> None:
        self.address: str | None = None

    def __call__(self) -> str | None:
        return self.address


def serve(stack: ExitStack, place: Place, drafter: FakeDrafter) -> DrafterServer:
    """Serves the drafter at the place."""
    stack.callback(drafter.assert_called_rightly)
    server = stack.enter_context(closing(DrafterServer(drafter)))
    stack.callback(drafter.may_go.set)
    place.address = server.address
    return server


def replica(stack: ExitStack, place: Place, kind: str = "draft_model", **options: Any) -> Replica:
    """A replica that finds its drafter at the place."""
    made = Replica(place, kind, **options)
    stack.callback(made.source.end)
    return made
