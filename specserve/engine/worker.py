"""What our workers add to vLLM's: the proposer hook gets its model runner, and can be asked."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import ModelRunnerOutput

from specserve.core.metric_specs import ALL
from specserve.core.samples import samples
from specserve.drafters.ray_metrics import RayExporter
from specserve.engine.cuda_graphs import capture_plain_steps
from specserve.engine.executor import attach_drafts
from specserve.engine.hook import ProposerHook
from specserve.engine.sampling import keep_asked_tokens, repair_sampling, without_speculation

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object  # vLLM's CPU worker is no module to import on a GPU node, nor the reverse


class SpeculationMixin(_Worker):
    """Mixed into vLLM's GPU and CPU workers; the base follows it in the method resolution order."""

    _hook: ProposerHook | None = None
    _is_idle = False
    """Whether the step at hand needs nothing of the hook."""

    def init_device(self) -> None:
        """Builds the model runner, then hands it to the proposer hook in rank 0."""
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

    def compile_or_warm_up_model(self) -> Any:
        """The last of vLLM's preparations: it has now taken its part of the GPU's memory."""
        times = super().compile_or_warm_up_model()
        if self._hook is not None:
            self._hook.is_warm.set()
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """One step; requests that have finished since the last one are forgotten first."""
        if self._hook is not None:
            self._hook.forget(scheduler_output.finished_req_ids)
            self._is_idle = self._hook.is_idle(scheduler_output)
        with self._speculation():
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """A step's tokens, with the drafts for the next one: the executor need not ask for them."""
        with self._speculation():
            output = super().sample_tokens(grammar_output)
        if self._hook is not None and isinstance(output, ModelRunnerOutput):
            if self._is_idle:
                self._hook.pass_over(output.sampled_token_ids)
            attach_drafts(output, self.take_draft_token_ids(), self._hook.take_outcomes())
        return output

    def close_sources(self) -> None:
        """Ends what the sources have started; there are no steps afterwards."""
        if self._hook is not None:
            self._hook.close()

    def shutdown(self) -> None:
        """Ends what the sources have started, then the worker."""
        self.close_sources()
        super().shutdown()

    def speculation_snapshot(self) -> bytes:
        """Rank 0's metrics so far as JSON; empty in other ranks."""
        return self._hook.snapshot() if self._hook is not None else b""

    def recent_requests(self, tenant: str) -> bytes:
        """A tenant's last requests in rank 0 as JSON; empty in other ranks."""
        return self._hook.recent_requests(tenant) if self._hook is not None else b""

    def learn_text(
        self,
        tokens: list[int],
        num_prompt_tokens: int,
        extra_args: dict[str, object],
        adapter: str,
    ) -> None:
        """See :meth:`ProposerHook.learn`; nothing in other ranks."""
        if self._hook is not None:
            self._hook.learn(tokens, num_prompt_tokens, extra_args, adapter)

    def _speculation(self) -> AbstractContextManager[None]:
        """What a step runs in: vLLM's speculation, or none where the step is idle."""
        return without_speculation(self.model_runner) if self._is_idle else nullcontext()


class InEngineMixin(_Worker):
    """Mixed into vLLM's workers where vLLM drafts by a method of its own."""

    def init_device(self) -> None:
        """Builds the model runner."""
        super().init_device()
        keep_asked_tokens(self.model_runner)


def _no_drafts(scheduler_output: Any, sampled_token_ids: Any, *rest: object) -> list[list[int]]:
    # vLLM takes the drafts of rank 0 alone.
    return [[] for _ in sampled_token_ids]


def _log_as_vllm() -> None:
    """Has our loggers write as vLLM's do: ``VLLM_LOGGING_LEVEL`` holds for them too."""
    ours, theirs = logging.getLogger("specserve"), logging.getLogger("vllm")
    ours.setLevel(theirs.level)
    for handler in theirs.handlers:
        ours.addHandler(handler)
