from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from vllm.config import ParallelConfig
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker as GpuWorker

from specserve.engine import executor as module
from specserve.engine.executor import (
    BriefPolling,
    DraftsWithTokens,
    NodeRayWorkerProc,
    RayExecutor,
)

DRAFTS = DraftTokenIds(["a"], [[1, 2]])
ASKED_FOR = DraftTokenIds(["a"], [[3]])


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> ModelRunnerOutput:
    """The shards' output of the next step. A separate call for drafts returns ``ASKED_FOR``."""
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    monkeypatch.setattr(MultiprocExecutor, "sample_tokens", lambda *_: output)
    monkeypatch.setattr(MultiprocExecutor, "take_draft_token_ids", lambda _: ASKED_FOR)
    return output


@pytest.fixture
def executor() -> DraftsWithTokens:
    return object.__new__(RayExecutor)  # without shards


@pytest.mark.parametrize("drafts", [DRAFTS, None])
def test_drafts_come_with_the_tokens(
    drafts: DraftTokenIds | None, output: ModelRunnerOutput, executor: DraftsWithTokens
) -> None:
    output.specserve_drafts = drafts
    assert executor.sample_tokens(None) is output
    assert executor.take_draft_token_ids() is drafts


def test_missing_drafts_are_requested_from_the_shards(
    output: ModelRunnerOutput, executor: DraftsWithTokens
) -> None:
    assert executor.take_draft_token_ids() is ASKED_FOR
    executor.sample_tokens(None)
    assert executor.take_draft_token_ids() is ASKED_FOR


def test_drafts_are_taken_only_once(output: ModelRunnerOutput, executor: DraftsWithTokens) -> None:
    output.specserve_drafts = DRAFTS
    executor.sample_tokens(None)
    executor.take_draft_token_ids()
    assert executor.take_draft_token_ids() is ASKED_FOR


def test_a_call_that_times_out_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def time_out(*_: object) -> None:
        raise TimeoutError

    failures: list[bool] = []
    executor = object.__new__(RayExecutor)  # without shards
    executor.is_failed, executor._num_read = False, []
    executor.register_failure_callback(lambda: failures.append(executor.is_failed))
    monkeypatch.setattr(MultiprocExecutor, "collective_rpc", time_out)
    with pytest.raises(TimeoutError):
        executor.collective_rpc("call_hook", 10, ("snapshot",))
    assert failures == [True]


class Answers:
    """A shard's queue of answers."""

    _is_remote_reader = False

    def __init__(self, *answers: object) -> None:
        self.left = list(answers)

    def dequeue(self, timeout: float | None = None) -> object:
        return self.left.pop(0)


def test_a_call_gets_its_own_answers_after_one_that_failed() -> None:
    good, bad = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE
    executor: Any = object.__new__(RayExecutor)  # without shards
    executor.is_failed, executor.futures_queue = False, deque()
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=lambda _: None)
    executor.response_mqs = [
        Answers((good, "a"), (bad, "no adapter"), (good, 0)),
        Answers((good, "b"), (bad, "no adapter"), (good, 1)),
    ]
    executor._count_reads()
    assert executor.collective_rpc("list_loras") == ["a", "b"]
    with pytest.raises(RuntimeError, match="no adapter"):
        executor.collective_rpc("add_lora")
    assert executor.collective_rpc("list_loras") == [0, 1]


@pytest.fixture
def condition() -> Iterator[BriefPolling]:
    """The condition of a reader that gets no messages."""
    context = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        ends = {"context": context, "notify_address": f"ipc://{folder}/notices"}
        _writers = BriefPolling(is_reader=False, **ends)
        yield BriefPolling(is_reader=True, **ends)
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("since_s", "waited_ms"), [(0.0, []), (0.01, [1]), (0.5, [1]), (2.0, [60_000])]
)
def test_a_queue_is_polled_only_briefly_after_a_read(
    since_s: float, waited_ms: list[int], condition: BriefPolling, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []

    def poll(timeout: int) -> list[object]:
        waited.append(timeout)
        return []

    monkeypatch.setattr(condition, "poller", SimpleNamespace(poll=poll))
    now = condition.last_read + since_s
    monkeypatch.setattr(time, "monotonic", lambda: now)
    condition.wait(timeout_ms=60_000)
    assert waited == waited_ms


def test_a_gpu_shard_needs_only_its_own_nodes_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = ParallelConfig(tensor_parallel_size=16, distributed_executor_backend=RayExecutor)
    shard = NodeRayWorkerProc(
        SimpleNamespace(parallel_config=parallel, logging_config=None), 0, None, True
    )
    monkeypatch.setattr(module, "keep_sockets_in_session", lambda: None)
    monkeypatch.setattr(RayWorkerProc, "initialize_worker", lambda *_, **__: None)
    shard.initialize_worker()

    worker = GpuWorker.__new__(GpuWorker)
    worker.device_config = SimpleNamespace(device_type="cuda")
    worker.parallel_config, worker.local_rank = parallel, 0
    parallel.assigned_physical_gpu_ids = list(range(8))

    def choose_gpu(_: int) -> int:
        raise LookupError("the checks of the GPUs are over")

    monkeypatch.setattr(
        type(current_platform), "logical_device_id_to_visible_device_id", staticmethod(choose_gpu)
    )
    with pytest.raises(LookupError):
        worker.init_device()
