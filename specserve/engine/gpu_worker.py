"""The GPU worker."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from specserve.engine.worker import InEngineMixin, SpeculationMixin


class GpuSpeculationWorker(SpeculationMixin, Worker):
    """vLLM's GPU worker with our proposer hook."""


class GpuInEngineWorker(InEngineMixin, Worker):
    """vLLM's GPU worker with a method of vLLM's own."""
