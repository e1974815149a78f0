"""An engine in a separate process that runs batches of vLLM's own ``SamplingParams``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import pytest

from specserve.compare.engine_process import engine_environment
from specserve.core.config import AppConfig

if TYPE_CHECKING:
    from specserve.engine.offline import OfflineEngine

TIMEOUT_S = 600.0
Logprobs = tuple[dict[int, float], ...]


@dataclass(frozen=True)
class Request:
    """A prompt and the fields of vLLM's ``SamplingParams``; greedy by default."""

    prompt: tuple[int, ...]
    params: dict[str, Any]


@dataclass(frozen=True)
class Written:
    """One continuation, with log-probabilities by position. A prompt's first token has none.

    Attributes:
        stopped_by: vLLM's finish reason and stop reason.
    """

    text: str
    token_ids: tuple[int, ...]
    stopped_by: tuple[str | None, int | str | None]
    logprobs: Logprobs
    prompt_logprobs: Logprobs


@dataclass(frozen=True)
class Step:
    """Number of requests in one step of the engine, and of those with a draft to verify."""

    num_requests: int
    num_drafting: int


@dataclass(frozen=True)
class Batch:
    """Answers to requests that were submitted together, in their order, and the engine's steps."""

    answers: tuple[tuple[Written, ...], ...]
    steps: tuple[Step, ...]


class BatchEngine:
    """A handle on the engine's process.

    Args:
        processes: a pool with one worker, in which :func:`_start` has run.
    """

    def __init__(self, processes: ProcessPoolExecutor) -> None:
        self._processes = processes
        self._is_whole = True

    def run(self, requests: Sequence[Request]) -> Batch:
        """Runs all requests at once. Earlier prompts are not cached."""
        assert self._is_whole, "an earlier batch broke the engine"
        self._is_whole = False
        batch = self._processes.submit(_run, tuple(requests)).result(TIMEOUT_S)
        self._is_whole = True
        return batch


@contextmanager
def batch_engine(config: AppConfig) -> Iterator[BatchEngine]:
    """An engine with all sources of the configuration, for the length of a block."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessPoolExecutor(1, get_context("spawn"), _start, (config,)) as processes,
    ):
        for name, value in engine_environment(config).items():
            patch.setenv(name, value)
        processes.submit(os.getpid).result(TIMEOUT_S)  # starts the process with these variables
        yield BatchEngine(processes)
        processes.submit(_close).result(TIMEOUT_S)


# The rest runs in the engine's process.

_engine: OfflineEngine
_steps: list[Step] = []


def _start(config: AppConfig) -> None:
    global _engine
    from specserve.engine.methods import parse_method
    from specserve.engine.offline import OfflineEngine

    _engine = OfflineEngine(config, parse_method("all", config))
    vllm = _engine._engine
    vllm.input_processor.speculative_config = None  # as in the served engine
    scheduler = vllm.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            drafting = len(output.scheduled_spec_decode_tokens)
            _steps.append(Step(len(output.num_scheduled_tokens), drafting))
        return output

    scheduler.schedule = noted


def _close() -> None:
    _engine.close()


def _run(requests: Sequence[Request]) -> Batch:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    vllm = _engine._engine
    vllm.reset_prefix_cache()
    _steps.clear()
    defaults = {"temperature": 0.0, "output_kind": RequestOutputKind.FINAL_ONLY}
    for index, request in enumerate(requests):
        prompt = {"prompt_token_ids": list(request.prompt)}
        vllm.add_request(f"{index}", prompt, SamplingParams(**(defaults | request.params)))
    answers: dict[str, tuple[Written, ...]] = {}
    while vllm.has_unfinished_requests():
        for output in vllm.step():
            if output.finished:
                answers[output.request_id] = _written(output)
    return Batch(tuple(answers[f"{index}"] for index in range(len(requests))), tuple(_steps))


def _written(output: Any) -> tuple[Written, ...]:
    return tuple(
        Written(
            text=each.text,
            token_ids=tuple(each.token_ids),
            stopped_by=(each.finish_reason, each.stop_reason),
            logprobs=_logprobs(each.logprobs),
            prompt_logprobs=_logprobs(output.prompt_logprobs),
        )
        for each in sorted(output.outputs, key=lambda each: each.index)
    )


def _logprobs(positions: Any) -> Logprobs:
    return tuple(
        {token: entry.logprob for token, entry in position.items()} if position else {}
        for position in positions or ()
    )
