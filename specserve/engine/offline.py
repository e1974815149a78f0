"""An engine without server or cluster that continues prompts and counts drafts.

It takes the Serve application's configuration, so a comparison runs the engine that is served.
vLLM's own draft methods can replace the configured sources.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import ray
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase

from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError, EngineError, reason_of
from specserve.core.metrics import AcceptanceSnapshot, SpeculationSnapshot
from specserve.engine.args import engine_args, served_engine_args, worker_cls
from specserve.engine.cpu.backend import choose_latent_attention
from specserve.engine.executor import InProcessExecutor
from specserve.engine.generation import Completion, Job, RunResult, Sampling, Show
from specserve.engine.methods import Method
from specserve.engine.report import Reports
from specserve.engine.temporary_files import keep_rendezvous_with_sockets
from specserve.sources.controls import PREDICTION_KEY

Progress = Callable[[int, int], None]
"""Called after each step with the numbers of finished prompts and of generated tokens."""

SOURCES_TIMEOUT_S = 300.0
"""Longest time in seconds for drafters to load their models."""


class OfflineEngine:
    """Runs prompts through one engine in this process.

    vLLM keeps global state, so use one engine a process, and :meth:`close` it.

    Raises:
        EngineError: the engine or a drafter did not start.
        ConfigError: an option is refused.
    """

    def __init__(self, config: AppConfig, method: Method) -> None:
        self._counter = _DraftCounter()
        self._method = method
        self._vllm_drafts = method.is_peer or method.narrowed(config).drafts_in_engine
        args = _offline_args(config, method)
        keep_rendezvous_with_sockets()
        try:
            choose_latent_attention(args)
            self._engine = LLMEngine.from_engine_args(
                args,
                stat_loggers=[lambda *_: self._counter],
                enable_multiprocessing=False,
            )
        except (RuntimeError, ValueError, OSError, ImportError) as error:
            raise EngineError(f"method {method}: {reason_of(error)}") from error
        self._reports = Reports.of(self._engine.vllm_config)
        self._num_requests = 0
        self._await_sources()

    def run(
        self,
        jobs: Sequence[Job],
        concurrency: int,
        progress: Progress,
        show: Show = lambda index, text, completion: None,
    ) -> RunResult:
        """Continues all jobs in their order, at most ``concurrency`` at a time.

        The prefix cache is cleared first. An exception of ``progress`` or ``show`` aborts all jobs.
        """
        assert concurrency >= 1
        self._engine.reset_prefix_cache()
        self._counter.reset()
        before = self._snapshot()
        open_requests: dict[str, _Request] = {}
        done: list[Completion | None] = [None] * len(jobs)
        num_added = num_done = num_tokens = 0
        started = time.perf_counter()
        try:
            while num_done < len(jobs):
                while num_added < len(jobs) and len(open_requests) < concurrency:
                    request_id = f"{self._num_requests}"
                    self._num_requests += 1
                    open_requests[request_id] = _Request(num_added)
                    self._add(request_id, jobs[num_added])
                    num_added += 1
                for output in self._engine.step():
                    assert isinstance(output, RequestOutput)
                    request = open_requests[output.request_id]
                    num_tokens += request.take(output)
                    if output.finished:
                        done[request.index] = request.completion(output, self._reports)
                        del open_requests[output.request_id]
                        num_done += 1
                    show(request.index, output.outputs[0].text, done[request.index])
                progress(num_done, num_tokens)
        finally:
            self._engine.abort_request([*open_requests])
        seconds = time.perf_counter() - started
        completions = tuple(c for c in done if c is not None)
        assert len(completions) == len(jobs)
        return RunResult(completions=completions, seconds=seconds, drafts=self._drafts(before))

    def close(self) -> None:
        """Shuts the engine down with all that it started."""
        self._engine.engine_core.shutdown()

    def _add(self, request_id: str, job: Job) -> None:
        prompt = {"prompt_token_ids": list(job.prompt_token_ids)}
        try:
            self._engine.add_request(request_id, prompt, _sampling_params(job.sampling))
        except (ValueError, VLLMClientError) as error:
            length, schema = f"{len(job.prompt_token_ids)} tokens", job.sampling.json_schema
            # vLLM checks both; a schema is what it refuses more often.
            field, value = ("prompt", length) if not schema else ("json_schema", schema)
            raise ConfigError(field, value, reason_of(error)) from error

    def _await_sources(self) -> None:
        """Waits until all drafters have loaded their models, so that a run measures all sources."""
        deadline = time.monotonic() + SOURCES_TIMEOUT_S
        while down := [each for each in self._snapshot().health if not each.up]:
            reasons = [f"{each.source}: {each.reason}" for each in down if each.reason]
            # In a cluster the search for the drafter goes on and may succeed.
            is_final = reasons and not ray.is_initialized()
            if is_final or time.monotonic() > deadline:
                self.close()
                names = ", ".join(each.source for each in down)
                late = f"{names} not up within {SOURCES_TIMEOUT_S:g} s"
                raise EngineError(f"method {self._method}: {', '.join(reasons) or late}")
            time.sleep(0.1)

    def _drafts(self, before: SpeculationSnapshot) -> tuple[AcceptanceSnapshot, ...]:
        if self._vllm_drafts:
            return (self._counter.counts(str(self._method)),)
        earlier = {entry.source: entry for entry in before.acceptance}
        return tuple(
            entry.since(earlier.get(entry.source)) for entry in self._snapshot().acceptance
        )

    def _snapshot(self) -> SpeculationSnapshot:
        """Counters of specserve's sources; empty where it has none or vLLM drafts."""
        if not self._method.sources or self._vllm_drafts:
            return SpeculationSnapshot()
        (first, *_) = self._engine.collective_rpc("call_hook", args=("snapshot",))
        return msgspec.json.decode(first, type=SpeculationSnapshot)


@dataclass
class _Request:
    """An open request and the output that it has produced so far."""

    index: int
    started: float = field(default_factory=time.perf_counter)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)

    def take(self, output: RequestOutput) -> int:
        """Adds a step's output and returns its number of new tokens."""
        (delta,) = output.outputs
        elapsed = time.perf_counter() - self.started
        self.token_seconds.extend(elapsed for _ in delta.token_ids)
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        for position in delta.logprobs or ():
            self.logprobs.append({token: entry.logprob for token, entry in position.items()})
        return len(delta.token_ids)

    def completion(self, output: RequestOutput, reports: Reports) -> Completion:
        (last,) = output.outputs
        drafts = reports.read(last.spec_decode_metrics)
        return Completion(
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=str(last.finish_reason),
            seconds=time.perf_counter() - self.started,
            token_seconds=tuple(self.token_seconds),
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.to_dict()["num_accepted_draft_tokens"],
            logprobs=tuple(self.logprobs),
            sources=drafts.sources,
        )


class _DraftCounter(StatLoggerBase):
    """Adds up the scheduler's counts of verified drafts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        # Number of drafts with at least 0, 1, ... tokens; the last entry is 0.
        self._drafted = self._accepted = np.zeros(1, np.int64)

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        stats = getattr(scheduler_stats, "spec_decoding_stats", None)
        if stats is not None:
            drafts = stats.num_drafts
            self._drafted = np.add(self._drafted, [drafts, *stats.num_draft_tokens_per_pos, 0])
            self._accepted = np.add(self._accepted, [drafts, *stats.num_accepted_tokens_per_pos, 0])

    def log_engine_initialized(self) -> None:
        return

    def counts(self, source: str) -> AcceptanceSnapshot:
        drafted, accepted = (-np.diff(each) for each in (self._drafted, self._accepted))
        return AcceptanceSnapshot(source, tuple(drafted.tolist()), tuple(accepted.tolist()))


def _sampling_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        logprobs=sampling.num_logprobs or None,
        logprob_token_ids=list(sampling.score_token_ids) or None,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=(
            StructuredOutputsParams(json=sampling.json_schema) if sampling.json_schema else None
        ),
        extra_args={PREDICTION_KEY: np.array(sampling.prediction, np.int32).tobytes()},
    )


def _offline_args(config: AppConfig, method: Method) -> EngineArgs:
    """The served engine's arguments, for one process and with statistics."""
    # Requests come without API key: with tenants they would use no draft memory.
    http = config.http.model_copy(update={"api_keys": ()})
    config = config.model_copy(update={"http": http})
    changes: dict[str, Any] = {"disable_log_stats": False}
    if method.is_peer:
        served = engine_args(config, _peer_speculation(config, method))
        if method.on_our_kernels:
            changes["worker_cls"] = worker_cls(drafts=False)
    else:
        served = served_engine_args(method.narrowed(config))
    if served.speculative_config:
        changes["per_request_spec_decode_metrics"] = "summary"
    if config.engine.tensor_parallel_size == 1:
        # One shard needs no cluster: the same worker runs in this process.
        changes["distributed_executor_backend"] = InProcessExecutor
    elif current_platform.is_cpu():
        # Local processes, because Ray's executor for CPUs needs a placement group.
        changes["distributed_executor_backend"] = "mp"
    else:
        _refuse_beside_rank_0(config, method)
    return dataclasses.replace(served, **changes)


def _refuse_beside_rank_0(config: AppConfig, method: Method) -> None:
    """Refuses drafters for which vLLM's own placement group has no room.

    Its bundles hold a GPU each, which the shard fills, and no CPU.

    Raises:
        ConfigError: the method has such a drafter.
    """
    for index, source in config.beside_rank_0.items():
        if source.kind in method.sources:
            allowed = "actor, where a command starts several shards on GPUs"
            raise ConfigError(f"speculation.{index}.placement", source.placement, allowed)


def _peer_speculation(config: AppConfig, method: Method) -> dict[str, Any]:
    """vLLM's ``speculative_config`` for one of its own methods."""
    source = next((s for s in config.speculation if s.kind == "ngram"), None)
    if method.name == "vllm-ngram":
        # Our default, a match of one token, suits lookup by votes. vLLM takes the first match.
        is_set = source is not None and "min_matching_ngram_size" in source.model_fields_set
        high = source.max_matching_ngram_size if source else 3
        low = source.min_matching_ngram_size if source and is_set else min(2, high)
        return {
            "method": "ngram",
            "num_speculative_tokens": source.max_draft_len if source else 5,
            "prompt_lookup_min": low,
            "prompt_lookup_max": high,
        }
    if method.name == "vllm-suffix":
        return {"method": "suffix", "num_speculative_tokens": method.number(default=16)}
    if method.name == "vllm-mtp":
        return {"method": "mtp", "num_speculative_tokens": method.number(default=1)}
    assert method.name == "vllm-draft"
    models = [each for each in config.speculation if each.kind == "draft_model"]
    return {
        "method": "draft_model",
        "model": method.argument,
        "num_speculative_tokens": models[0].max_draft_len if models else 5,
    }
