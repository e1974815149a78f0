"""The GPU workers."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from specserve.engine.memory_profile import profile_longest_drafts
from specserve.engine.worker import InEngineMixin, SpeculationMixin


class GpuSpeculationWorker(SpeculationMixin, Worker):
    """vLLM's GPU worker with the proposer hook."""

    def init_device(self) -> None:
        """Builds the model runner."""
        super().init_device()
        profile_longest_drafts(self.model_runner)


class GpuInEngineWorker(InEngineMixin, Worker):
    """vLLM's GPU worker with one of vLLM's own draft methods."""
