"""Runs the tensor-parallel shards as Ray actors where there is no GPU.

On GPU nodes vLLM's own Ray executor is used unchanged. It refuses CPUs, because the CPU platform
names no Ray resource for a device; everything else in it works. This subclass counts CPUs as
devices, and answers the one question that has no answer there: which GPUs a shard was given.
"""

from __future__ import annotations

import os
import time

import ray
from vllm.config import ParallelConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc


class CpuRayWorkerProc(RayWorkerProc):
    """A shard on CPU."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """This node's id and no GPUs."""
        # Where a host has no default route vLLM finds 0.0.0.0; Ray knows the address that is used.
        os.environ.setdefault("VLLM_HOST_IP", ray.util.get_node_ip_address())
        return ray.get_runtime_context().get_node_id(), []

    def _init_message_queues(self, *args: object, **kwargs: object) -> None:
        shm_broadcast.sched_yield = _nap
        super()._init_message_queues(*args, **kwargs)


class CpuRayExecutor(RayExecutorV2):
    """vLLM's Ray executor for nodes without GPUs; needs ``parallel_config.placement_group``."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, object]:
        # The bundle has reserved the shard's CPUs; the actor only has to land in it.
        return {"num_gpus": 0}

    def _init_executor(self) -> None:
        # vLLM looks these names up in this process, the engine core's own. Its
        # `initialize_ray_cluster` would refuse a bundle with more than one CPU.
        type(current_platform).ray_device_key = "CPU"
        shm_broadcast.sched_yield = _nap
        ray_executor_v2.RayWorkerProc = CpuRayWorkerProc
        ray_executor_v2.initialize_ray_cluster = _connect
        super()._init_executor()


def _nap() -> None:
    """Waits a moment for another process.

    vLLM's readers poll their queues with ``sched_yield`` while they are in use. On a GPU node that
    takes a spare CPU; here it takes one of those that the shard computes with.
    """
    time.sleep(50e-6)


def _connect(parallel_config: ParallelConfig, **options: object) -> None:
    assert parallel_config.placement_group is not None, "the replica reserves the shards' place"
    if not ray.is_initialized():
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
