"""Switches that benchmarks use between the turns of one engine."""

from __future__ import annotations

import numpy as np
import pytest

from specserve.core.metrics import SpeculationMetrics
from specserve.core.types import RequestControls
from specserve.policy.chain import Chain
from specserve.sources.base import Member
from tests.peers.in_process import SourcesSwitch
from tests.sources.answering_source import always, batch


@pytest.fixture
def chain() -> Chain:
    members = [
        Member("ngram", always(5), ("ngram",), 8, False),
        Member("prediction", always(6), ("prediction",), 8, False, needs="prediction"),
    ]
    return Chain(members, SpeculationMetrics(), num_slots=4, vocab_size=100)


def test_only_the_sources_that_are_switched_on_draft(chain: Chain) -> None:
    switch = SourcesSwitch(chain)
    first, step = np.zeros(1, np.int64), batch(1)
    turns = [["prediction"], [], ["ngram"], ["ngram", "prediction"], ["prediction"]]
    for kinds, draft in zip(turns, ([6], [], [5], [5], [6]), strict=True):
        switch(kinds)
        chain.open(0, RequestControls(prediction=b"1234"))
        chain.observe(step, np.ones(1, np.int32), np.zeros(1, np.int32))
        assert chain.step(step) == [draft]
        chain.close(first)
