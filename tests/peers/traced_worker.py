"""The worker's part of :mod:`tests.peers.traced`, on CPU.

It is a separate module, which vLLM imports by name when the worker starts. Before that, vLLM
inspects every imported module. numba's libraries, which the sources load, break that.
"""

from __future__ import annotations

from typing import Any

from specserve.engine.cpu.worker import CpuSpeculationWorker, CpuWorker
from tests.peers.spans import wrap


class TracedCpuWorker(CpuWorker):
    """A worker without sources."""

    def init_device(self) -> None:
        """Builds the model runner."""
        super().init_device()
        _wrap_worker(self)


class TracedCpuSpeculationWorker(CpuSpeculationWorker):
    """A worker that drafts."""

    def init_device(self) -> None:
        """Builds the model runner."""
        super().init_device()
        _wrap_worker(self)


def _wrap_worker(worker: Any) -> None:
    wrap(worker, "execute_model", "worker: execute model")
    wrap(worker, "sample_tokens", "worker: sample")
    wrap(worker.model_runner, "_prepare_inputs", "prepare inputs")
    wrap(worker.model_runner, "_model_forward", "forward")
    wrap(worker.model_runner, "propose_draft_token_ids", "draft")
