"""Which code of a step is compiled: all of it before the first request, and nothing afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher

from specserve.core.source_config import NgramConfig, PredictionConfig
from specserve.core.types import RequestControls
from specserve.policy import acceptance, cost, planner, step
from specserve.sources import guard, ngram, prediction
from specserve.sources.base import SourceContext
from specserve.sources.ngram import NgramSource
from specserve.sources.prediction import PredictionSource
from tests.draft_batches import draft_batch
from tests.policy.traffic import Clock, DistantSource, LocalSource, Traffic


def compiled() -> dict[str, int]:
    """How many signatures each compiled function has, by its name."""
    return {
        f"{module.__name__}.{name}": len(value.signatures)
        for module in (acceptance, cost, planner, step, guard, ngram, prediction)
        for name, value in vars(module).items()
        if isinstance(value, Dispatcher) and value.py_func.__module__ == module.__name__
    }


def test_no_traffic_compiles_anything_that_a_new_chain_has_not() -> None:
    clock, context = Clock(), SourceContext(num_slots=16)
    lookup = NgramSource(NgramConfig(kind="ngram"), context)
    near, distant = (
        LocalSource(lambda slot: (1, 2, 3), clock),
        DistantSource(lambda slot: (1,), clock),
    )
    predicted = PredictionSource(PredictionConfig(kind="prediction"), context)
    local: dict[str, Any] = {"ngram": lookup, "prediction": predicted}
    traffic = Traffic({"trie": near, "mtp": distant, **local}, clock, slots=())
    before = compiled()
    ours = {name: count for name, count in before.items() if name.rsplit(".", 1)[-1] in KERNELS}
    assert ours == dict.fromkeys(ours, 1)
    assert len(ours) == len(KERNELS)

    traffic.run(2)
    for slot in range(16):  # of tenants that arrays have no room for yet
        traffic.controls = RequestControls(
            tenant=str(slot % 5), prediction=np.arange(99, dtype=np.int32).tobytes()
        )
        traffic.open(slot)
    traffic.run(40)
    traffic.close(*range(1, 16))
    traffic.run(20)
    lookup.propose(draft_batch({0: list(range(5000))}), np.full(1, 8, np.int32))
    assert compiled() == before


KERNELS = {
    "unseen_survival",
    "_reset",
    "_update",
    "_observe_step",
    "is_calibrated",
    "spend",
    "plan_call",
    "observe",
    "foresee",
    "decide",
    "_take",
    "step_batch",
    "draft_step",
    "rehash",
}
