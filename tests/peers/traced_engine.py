"""The engine core's part of :mod:`tests.peers.traced`. It is imported where vLLM runs."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackEncoder

from specserve.engine.executor import CpuRayExecutor, InProcessExecutor
from tests.peers.spans import wrap

wrap(EngineCoreProc, "_process_engine_step", "step")
wrap(EngineCoreProc, "_handle_client_request", "take request")
wrap(Scheduler, "schedule", "schedule")
wrap(Scheduler, "update_from_output", "update from output")
wrap(MsgpackEncoder, "encode_into", "encode outputs")


class TracedInProcessExecutor(InProcessExecutor):
    """The executor with one shard in the engine core's process."""


class TracedCpuRayExecutor(CpuRayExecutor):
    """The executor with shard actors. Its time minus the workers' time is the hand-over."""


EXECUTORS = {InProcessExecutor: TracedInProcessExecutor, CpuRayExecutor: TracedCpuRayExecutor}
for executor in EXECUTORS.values():
    wrap(executor, "execute_model", "executor: execute model")
    wrap(executor, "sample_tokens", "executor: sample")
