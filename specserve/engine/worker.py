"""Mixins for vLLM's workers that attach the proposer hook and give access to its data."""

from __future__ import annotations

import copy
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import ModelRunnerOutput

from specserve.core.metric_specs import ALL
from specserve.core.samples import samples
from specserve.drafters.ray_metrics import RayExporter
from specserve.engine.cuda_graphs import capture_plain_steps
from specserve.engine.hook import ProposerHook
from specserve.engine.sampling import keep_asked_tokens, repair_sampling, without_speculation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object  # a node has either vLLM's GPU worker or its CPU worker to import


class SpeculationMixin(_Worker):
    """Mixin with the proposer hook; vLLM's GPU or CPU worker must be the next base class."""

    vllm_config: VllmConfig
    _hook: ProposerHook | None = None
    _is_idle = False
    """Whether the current step is idle, see :meth:`ProposerHook.is_idle`."""

    def init_device(self) -> None:
        """Builds the model runner, and in rank 0 attaches it to the proposer hook."""
        # A copy: in one process the scheduler reads our options from the engine's configuration.
        self.vllm_config = copy.copy(self.vllm_config)
        super().init_device()
        _log_as_vllm()
        repair_sampling(self.model_runner)
        capture_plain_steps(self.model_runner)
        if self.rank == 0:
            drafter = self.model_runner.drafter
            assert isinstance(drafter, ProposerHook), f"unexpected drafter {drafter!r}"
            drafter.attach(self.model_runner)
            self._hook = drafter
            metrics, labels = drafter.metrics, {"model": drafter.model_name}
            RayExporter(ALL, lambda: samples(metrics.snapshot()), labels).start()
        else:
            self.model_runner.propose_draft_token_ids = _no_drafts
        _leave_settings_out(self.vllm_config)

    def compile_or_warm_up_model(self) -> Any:
        """Warms up. vLLM then has its share of GPU memory, so drafters beside it may start."""
        times = super().compile_or_warm_up_model()
        if self._hook is not None:
            self._hook.is_warm.set()
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs one step, after dropping requests that have finished since the last one."""
        if self._hook is not None:
            self._hook.forget(scheduler_output.finished_req_ids)
            self._is_idle = self._hook.is_idle(scheduler_output)
        with self._speculation():
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Returns the step's tokens with the next drafts, so that the executor need not ask.

        The outcomes of the last drafts come with them, for the scheduler.
        """
        with self._speculation():
            output = super().sample_tokens(grammar_output)
        if self._hook is not None and isinstance(output, ModelRunnerOutput):
            if self._is_idle:
                self._hook.note_idle_step(output.sampled_token_ids)
            output.specserve_drafts = self.take_draft_token_ids()
            output.specserve_outcomes = self._hook.take_outcomes()
        return output

    def close_sources(self) -> None:
        """Stops what the sources have started; no step may follow."""
        if self._hook is not None:
            self._hook.close()

    def shutdown(self) -> None:
        """Stops what the sources have started, then the worker."""
        self.close_sources()
        super().shutdown()

    def call_hook(self, method: str, *args: object) -> Any:
        """Calls a method of rank 0's :class:`ProposerHook`; None in other ranks."""
        return getattr(self._hook, method)(*args) if self._hook is not None else None

    def _speculation(self) -> AbstractContextManager[None]:
        """Context of a step, which switches speculation off while the step is idle."""
        return without_speculation(self.model_runner) if self._is_idle else nullcontext()


class InEngineMixin(_Worker):
    """Mixin for vLLM's workers with one of vLLM's own draft methods."""

    def init_device(self) -> None:
        """Builds the model runner."""
        super().init_device()
        keep_asked_tokens(self.model_runner)


def _no_drafts(scheduler_output: Any, sampled_token_ids: Any, *rest: object) -> list[list[int]]:
    # vLLM takes the drafts of rank 0 alone.
    return [[] for _ in sampled_token_ids]


def _leave_settings_out(config: VllmConfig) -> None:
    """Removes our options, which have been read by now.

    vLLM finds compiled models by a hash of its configuration. It would compile the model anew after
    each change of an option of ours.
    """
    options = config.additional_config.items()
    config.additional_config = {key: value for key, value in options if "specserve" not in key}


def _log_as_vllm() -> None:
    """Gives specserve's loggers vLLM's handlers and level (``VLLM_LOGGING_LEVEL``)."""
    ours, theirs = logging.getLogger("specserve"), logging.getLogger("vllm")
    ours.setLevel(theirs.level)
    for handler in theirs.handlers:
        ours.addHandler(handler)
