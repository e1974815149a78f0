"""All kernels of a step are compiled before the first request."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher

from specserve.core.source_config import NgramConfig, PredictionConfig
from specserve.core.types import RequestControls
from specserve.policy import acceptance, cost, planner, step
from specserve.sources import ngram, prediction
from specserve.sources.base import SourceContext
from specserve.sources.ngram import NgramSource
from specserve.sources.prediction import PredictionSource
from tests.draft_batches import draft_batch, propose
from tests.policy.traffic import Clock, FakeLocal, FakeRemote, Traffic


def compiled() -> dict[str, int]:
    """Number of signatures of each compiled function, by name."""
    return {
        f"{module.__name__}.{name}": len(value.signatures)
        for module in (acceptance, cost, planner, step, ngram, prediction)
        for name, value in vars(module).items()
        if isinstance(value, Dispatcher) and value.py_func.__module__ == module.__name__
    }


def test_no_request_compiles_a_kernel_after_the_chain_is_built() -> None:
    clock, context = Clock(), SourceContext(num_slots=16)
    lookup = NgramSource(NgramConfig(kind="ngram"), context)
    near, remote = (
        FakeLocal(lambda slot: (1, 2, 3), clock),
        FakeRemote(lambda slot: (1,), clock),
    )
    predicted = PredictionSource(PredictionConfig(kind="prediction"), context)
    local: dict[str, Any] = {"ngram": lookup, "prediction": predicted}
    traffic = Traffic({"trie": near, "mtp": remote, **local}, clock, slots=())
    before = compiled()
    ours = {name: count for name, count in before.items() if name.rsplit(".", 1)[-1] in KERNELS}
    assert ours == dict.fromkeys(ours, 1)
    assert len(ours) == len(KERNELS)

    traffic.run(2)
    for slot in range(16):  # of new tenants, for which arrays grow
        traffic.controls = RequestControls(
            tenant=str(slot % 5), prediction=np.arange(99, dtype=np.int32).tobytes()
        )
        traffic.open(slot)
    traffic.run(40)
    traffic.close(*range(1, 16))
    traffic.run(20)
    propose(lookup, draft_batch({0: list(range(5000))}), np.full(1, 8, np.int32))
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
    "plan_step",
    "decide",
    "step_batch",
    "draft_step",
    "rehash",
}
