"""The GPU workers."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from specserve.engine.worker import InEngineMixin, SpeculationMixin


class GpuSpeculationWorker(SpeculationMixin, Worker):
    """vLLM's GPU worker with the proposer hook."""


class GpuInEngineWorker(InEngineMixin, Worker):
    """vLLM's GPU worker with one of vLLM's own draft methods."""
