"""Runs the tensor-parallel shards: one in the engine core's process, or all as Ray actors.

A single CPU shard on the replica's own node runs in process, without messages between processes.
All other shards are Ray actors. The subclasses here fix three defects of vLLM's Ray executor. It
waits for ever for a shard that has died on another node. After a call that failed, it takes answers
to it for answers to the next call. It also refuses CPUs, because the CPU platform names no Ray
resource. The CPU subclass counts CPUs as devices and reports no GPU ids.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from vllm import envs
from vllm.config import ParallelConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import DraftTokenIds

from specserve.engine.scheduler import DraftScheduler
from specserve.engine.temporary_files import (
    keep_rendezvous_with_sockets,
    keep_sockets_in_session,
)

if TYPE_CHECKING:
    from vllm.v1.executor.abstract import Executor as _Executor
else:
    _Executor = object

_LATER_ANSWER_S = 60.0
"""Longest wait in seconds for the other shards' answers to a call that failed in one shard."""
_SHUTDOWN_CHECK_S = 1.0
"""Interval in seconds at which a reader of another node's queue checks for its shutdown."""
_POLLING_S = 1e-3
"""Seconds of polling after each message. A message within a step arrives sooner."""
_MAX_WAIT_MS = 1
_IN_USE_S = 1.0
"""Seconds after a message in which a queue counts as in use. The value is vLLM's."""

_NOT_ATTACHED: Any = object()


class DraftsWithTokens(_Executor):
    """Mixin for vLLM's executors: reads the next drafts from the step's output.

    This saves one call to the shards. vLLM asks for drafts in a separate call after each step, and
    the shards compute nothing meanwhile. vLLM's executor must be the next base class.

    The drafts of new requests need such a call. The step with their prompts takes much longer.
    """

    _drafts: DraftTokenIds | None = _NOT_ATTACHED

    def _init_executor(self) -> None:
        super()._init_executor()
        DraftScheduler.draft_first_with(self._draft_first)

    def _draft_first(self, requests: Sequence[Any], num_requests: int) -> list[list[int]]:
        """Drafts for new requests in a step of ``num_requests``, from the hook in rank 0."""
        args = "draft_first", requests, num_requests
        timeout = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        of_rank_0: list[list[int]]
        of_rank_0, *_ = self.collective_rpc("call_hook", timeout, args)
        return of_rank_0

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Returns the step's tokens and keeps the drafts that come with them."""
        output = super().sample_tokens(grammar_output, non_block)
        self._drafts = getattr(output, "specserve_drafts", _NOT_ATTACHED)
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Returns the drafts for the next step. Asks the shards only if the output had none."""
        drafts, self._drafts = self._drafts, _NOT_ATTACHED
        return super().take_draft_token_ids() if drafts is _NOT_ATTACHED else drafts


class InProcessExecutor(DraftsWithTokens, UniProcExecutor):
    """vLLM's executor for one shard in this process.

    In a replica this is the engine core's process. It connects to Ray for sources and metrics.
    """

    def _init_executor(self) -> None:
        if self.parallel_config.placement_group is not None:
            _connect(self.parallel_config)
        keep_rendezvous_with_sockets()
        super()._init_executor()


class NodeRayWorkerProc(RayWorkerProc):
    """A shard that knows its own node: Ray's folder there for its sockets, and only its GPUs."""

    def initialize_worker(self, *args: Any, **options: Any) -> None:
        """Starts the worker."""
        # Before vLLM copies the folder of the engine core, which may be on another node.
        keep_sockets_in_session()
        # vLLM's GPU worker recognises Ray by this name alone. With the executor's class it wants
        # the GPUs of all shards on this node.
        self._parallel_config.distributed_executor_backend = "ray"
        super().initialize_worker(*args, **options)


class CpuRayWorkerProc(NodeRayWorkerProc):
    """A shard on CPU."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """This node's id and no GPUs."""
        # On a host without default route vLLM finds 0.0.0.0; Ray knows the right address.
        os.environ.setdefault("VLLM_HOST_IP", ray.util.get_node_ip_address())
        return ray.get_runtime_context().get_node_id(), []

    def _init_message_queues(self, *args: object, **kwargs: object) -> None:
        shm_broadcast.SpinCondition = BriefPolling
        super()._init_message_queues(*args, **kwargs)


class RayExecutor(DraftsWithTokens, RayExecutorV2):
    """vLLM's Ray executor. Its engine also ends when a shard on another node dies or hangs."""

    _worker_type = NodeRayWorkerProc

    def collective_rpc(self, *args: Any, **options: Any) -> Any:
        """Calls the shards, and ends the engine when they do not answer in time.

        vLLM ends the engine only after a late step. After another late call it continues, and takes
        the late answer for the answer to the next call. After a shard's error it would do the same
        with the answers of later shards. They are read here.
        """
        numbers = list(self._num_read)
        try:
            try:
                return super().collective_rpc(*args, **options)
            except RuntimeError:
                if options.get("unique_reply_rank") is None:
                    self._read_later_answers(numbers)
                raise
        except TimeoutError:
            self.is_failed = True
            if self.failure_callback is not None:
                self.failure_callback()
            raise

    def _read_later_answers(self, numbers: list[int]) -> None:
        """Reads the answers of the shards of which none was read since ``numbers`` were noted."""
        for rank, queue in enumerate(self.response_mqs):
            if self._num_read[rank] == numbers[rank] and not self.is_failed:
                queue.dequeue(_LATER_ANSWER_S)

    def _init_executor(self) -> None:
        ray_executor_v2.RayWorkerProc = self._worker_type  # vLLM looks the name up in its module
        super()._init_executor()
        self._count_reads()

    def _count_reads(self) -> None:
        self._num_read = [0] * len(self.response_mqs)
        for rank, queue in enumerate(self.response_mqs):
            read = partial(_dequeue, queue) if queue._is_remote_reader else queue.dequeue
            queue.dequeue = partial(self._read, rank, read)

    def _read(self, rank: int, read: Callable[..., object], *args: Any, **options: Any) -> object:
        message = read(*args, **options)
        self._num_read[rank] += 1
        return message


def _dequeue(queue: MessageQueue, timeout: float | None = None, indefinite: bool = False) -> object:
    """Reads from another node's queue until a message, the timeout or the queue's shutdown.

    After a shard's death vLLM shuts the queues down, but wakes only the readers of its own node.

    Args:
        queue: vLLM's queue.
        timeout: in seconds; None: no limit.
        indefinite: unused, as in all of vLLM's remote readers.

    Raises:
        TimeoutError: no message came in time.
        RuntimeError: the queue was shut down.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while True:
        rest_s = min(deadline - time.monotonic(), _SHUTDOWN_CHECK_S)
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
        # The bundle reserves the shard's CPUs, so the actor asks for no devices.
        return {"num_gpus": 0}

    def _init_executor(self) -> None:
        # vLLM looks these names up in the engine core's process. Its `initialize_ray_cluster`
        # refuses a bundle with more than one CPU.
        type(current_platform).ray_device_key = "CPU"
        shm_broadcast.SpinCondition = BriefPolling
        ray_executor_v2.initialize_ray_cluster = _connect
        super()._init_executor()


class BriefPolling(SpinCondition):
    """Makes a queue's reader poll for a millisecond, then wait for the writer's notice.

    vLLM polls for a second after each message. On a GPU node polling uses a spare CPU; on a CPU
    node it takes a core from the model.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(busy_loop_s=_POLLING_S, **options)

    def wait(self, timeout_ms: int | None = None) -> None:
        """Waits like vLLM's method. The caller checks the queue after it and may wait again."""
        is_in_use = time.monotonic() < self.last_read + _IN_USE_S
        # The notice of a message may be lost when it follows another within a few ms.
        super().wait(timeout_ms=_MAX_WAIT_MS if is_in_use else timeout_ms)


def _connect(parallel_config: ParallelConfig, **options: object) -> None:
    assert parallel_config.placement_group is not None, "the replica reserves the shards' place"
    if not ray.is_initialized():
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
