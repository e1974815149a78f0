"""Runs the tensor-parallel shards: one in the engine core's process, or all as Ray actors.

A single shard on CPU, placed on the replica's own node, needs no hand-over between processes. All
others are Ray actors. vLLM's own Ray executor waits for ever for a shard that has died on another
node. It also refuses CPUs, because the CPU platform names no Ray resource for a device; everything
else in it works. The subclass for CPU counts CPUs as devices, and answers the one question that has
no answer there: which GPUs a shard was given.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from vllm.config import ParallelConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from specserve.engine.report import Outcome
from specserve.engine.temporary_files import (
    keep_rendezvous_with_sockets,
    keep_sockets_in_session,
)

if TYPE_CHECKING:
    from vllm.v1.executor.abstract import Executor as _Executor
else:
    _Executor = object

_LOOK_S = 1.0
"""How often a reader of another node's queue looks whether it is to end."""
_POLLING_S = 1e-3
"""How long a queue is polled after each message: a hand-over within a step takes less."""
_LONGEST_WAIT_MS = 1
_IN_USE_S = 1.0
"""After a message a queue is taken to be in use for so long, as by vLLM."""

_NOT_ATTACHED: Any = object()


def attach_drafts(
    output: ModelRunnerOutput, drafts: DraftTokenIds | None, outcomes: Mapping[str, Outcome]
) -> None:
    """Gives a step's output the next step's drafts, and what became of the last ones to count."""
    output.specserve_drafts = drafts
    output.specserve_outcomes = outcomes


class DraftsWithTokens(_Executor):
    """Takes a step's drafts from the output that brings its tokens: a call to the shards less.

    vLLM asks for them with a call of their own after each step, during which nothing is computed.
    Mixed into vLLM's executors; the base follows it in the method resolution order.
    """

    _drafts: DraftTokenIds | None = _NOT_ATTACHED

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """A step's tokens."""
        output = super().sample_tokens(grammar_output, non_block)
        self._drafts = getattr(output, "specserve_drafts", _NOT_ATTACHED)
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts for the next step; asks the shards only if the tokens came without."""
        drafts, self._drafts = self._drafts, _NOT_ATTACHED
        return super().take_draft_token_ids() if drafts is _NOT_ATTACHED else drafts


class InProcessExecutor(DraftsWithTokens, UniProcExecutor):
    """vLLM's executor for one shard in this very process.

    Of a replica it is the engine core's, which joins the cluster: sources and metrics need that.
    """

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """No: a step is over when the call returns, so that its tokens would only come later."""
        return False

    def _init_executor(self) -> None:
        if self.parallel_config.placement_group is not None:
            _connect(self.parallel_config)
        keep_rendezvous_with_sockets()
        super()._init_executor()


class NodeRayWorkerProc(RayWorkerProc):
    """A shard, whose node may have another temporary folder than the engine core's."""

    def initialize_worker(self, *args: Any, **options: Any) -> None:
        """Starts the worker."""
        # Before vLLM sets the engine core's folder, which is of another node.
        keep_sockets_in_session()
        super().initialize_worker(*args, **options)


class CpuRayWorkerProc(NodeRayWorkerProc):
    """A shard on CPU."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """This node's id and no GPUs."""
        # Where a host has no default route vLLM finds 0.0.0.0; Ray knows the address that is used.
        os.environ.setdefault("VLLM_HOST_IP", ray.util.get_node_ip_address())
        return ray.get_runtime_context().get_node_id(), []

    def _init_message_queues(self, *args: object, **kwargs: object) -> None:
        shm_broadcast.SpinCondition = BriefPolling
        super()._init_message_queues(*args, **kwargs)


class RayExecutor(DraftsWithTokens, RayExecutorV2):
    """vLLM's Ray executor, whose engine ends also where a shard dies on another node or hangs."""

    _worker_type = NodeRayWorkerProc

    def collective_rpc(self, *args: Any, **options: Any) -> Any:
        """Calls the shards; when they do not answer in time the engine ends.

        vLLM ends it where a step is late. After any other call that is late it goes on, and would
        take the answer, when it comes, for the next call's.
        """
        try:
            return super().collective_rpc(*args, **options)
        except TimeoutError:
            self.is_failed = True
            if self.failure_callback is not None:
                self.failure_callback()
            raise

    def _init_executor(self) -> None:
        ray_executor_v2.RayWorkerProc = self._worker_type  # vLLM looks the name up in its module
        super()._init_executor()
        for queue in self.response_mqs:
            if queue._is_remote_reader:
                queue.dequeue = partial(_dequeue, queue)


def _dequeue(queue: MessageQueue, timeout: float | None = None, indefinite: bool = False) -> object:
    """Reads from a queue of another node, unless it is shut down meanwhile.

    After a shard's death vLLM shuts the queues down, but wakes only the readers of its own node.

    Args:
        queue: vLLM's queue.
        timeout: in seconds; None: none.
        indefinite: unused, as for all of vLLM's remote readers.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while True:
        rest_s = min(deadline - time.monotonic(), _LOOK_S)
        try:
            return MessageQueue.dequeue(queue, max(rest_s, 0.0), indefinite)
        except TimeoutError:
            if queue.shutting_down:
                raise RuntimeError("cancelled") from None
            if time.monotonic() >= deadline:
                raise


class CpuRayExecutor(RayExecutor):
    """The executor for nodes without GPUs; needs ``parallel_config.placement_group``."""

    _worker_type = CpuRayWorkerProc

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, object]:
        # The bundle has reserved the shard's CPUs; the actor only has to land in it.
        return {"num_gpus": 0}

    def _init_executor(self) -> None:
        # vLLM looks these names up in this process, the engine core's own. Its
        # `initialize_ray_cluster` would refuse a bundle with more than one CPU.
        type(current_platform).ray_device_key = "CPU"
        shm_broadcast.SpinCondition = BriefPolling
        ray_executor_v2.initialize_ray_cluster = _connect
        super()._init_executor()


class BriefPolling(SpinCondition):
    """How a reader waits for its queue's writer: it polls as long as a hand-over takes, no longer.

    vLLM's polls for a second after each message, and then waits for the writer's notice. On a GPU
    node polling takes a spare CPU; here it takes one of those that the shards compute with.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(busy_loop_s=_POLLING_S, **options)

    def wait(self, timeout_ms: int | None = None) -> None:
        """As vLLM's; the caller looks again and waits on."""
        is_in_use = time.monotonic() < self.last_read + _IN_USE_S
        # Of two messages within some ms the second's notice may be lost.
        super().wait(timeout_ms=_LONGEST_WAIT_MS if is_in_use else timeout_ms)


def _connect(parallel_config: ParallelConfig, **options: object) -> None:
    assert parallel_config.placement_group is not None, "the replica reserves the shards' place"
    if not ray.is_initialized():
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
