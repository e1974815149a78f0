from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from specserve.engine.hook import ProposerHook
from specserve.engine.logits_processors import PROCESSORS
from specserve.engine.sampler import (
    AskedTokensRejectionSampler,
    AskedTokensSampler,
    IndependentRejectionSampler,
    IndependentSampler,
)
from specserve.engine.worker import InEngineMixin, SpeculationMixin

_REPAIRS = (
    *("repair_kernels", "use_verifying_backend", "use_flash_prefill", "use_fastest_linear"),
    *("use_norm_kernels", "use_vector_rotary", "sample_by_drawing", "use_saved_models"),
    *("round_weights_instead", "_forbid_compilation"),
)

SPECULATION = SimpleNamespace(rejection_sample_method="standard")


class OneOfManyRanks:
    """The part of vLLM's worker that the mixin uses, in a rank that does not draft."""

    rank = 1
    has_inner_state = False
    is_shut_down = False
    vllm_config = SimpleNamespace(additional_config={"specserve": {}, "of_vllm": 1})

    def execute_model(self, scheduler_output: object) -> None:
        self.taken_with = [self.model_runner.speculative_config]

    def sample_tokens(self, grammar_output: object) -> ModelRunnerOutput:
        self.taken_with.append(self.model_runner.speculative_config)
        return ModelRunnerOutput(["a"], {"a": 0}, sampled_token_ids=[[7]])

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        is_asked = self.model_runner.speculative_config and self.taken_with[-1]
        return DraftTokenIds(["a"], [[1]]) if is_asked else None

    def compile_or_warm_up_model(self) -> str:
        return "times"

    def shutdown(self) -> None:
        self.is_shut_down = True

    def init_device(self) -> None:
        self.model_runner = SimpleNamespace(
            device=torch.device("cpu"),
            vllm_config=SimpleNamespace(
                scheduler_config=SimpleNamespace(max_num_seqs=8),
                model_config=SimpleNamespace(get_vocab_size=lambda: 100),
                speculative_config=None,
                reasoning_config=None,
            ),
            input_batch=SimpleNamespace(logitsprocs=None),
            model_config=SimpleNamespace(has_inner_state=self.has_inner_state, is_hybrid=False),
            speculative_config=SPECULATION,
            sampler=Sampler(),
            num_spec_tokens=3,
            uniform_decode_query_len=4,
            cudagraph_dispatcher=SimpleNamespace(uniform_decode_query_len=4),
        )
        runner = self.model_runner
        runner._prepare_inputs = lambda scheduled, num_tokens: runner.speculative_config


class Worker(SpeculationMixin, OneOfManyRanks):
    pass


@pytest.fixture(autouse=True)
def our_log() -> Iterator[None]:
    """Restores our loggers, which a worker sets up like vLLM's."""
    ours = logging.getLogger("specserve")
    level, handlers = ours.level, list(ours.handlers)
    yield
    ours.setLevel(level)
    ours.handlers[:] = handlers


def test_only_vllms_options_stay_in_the_configuration_that_names_compiled_models() -> None:
    worker = Worker()
    of_engine = worker.vllm_config
    worker.init_device()
    assert worker.vllm_config.additional_config == {"of_vllm": 1}
    assert of_engine.additional_config == {"specserve": {}, "of_vllm": 1}


def test_a_rank_that_does_not_draft_samples_as_the_one_that_does() -> None:
    worker = Worker()
    worker.init_device()
    processors = worker.model_runner.input_batch.logitsprocs
    assert {type(each) for each in processors.all} == {*BUILTIN_LOGITS_PROCESSORS, *PROCESSORS}
    assert isinstance(worker.model_runner.sampler, IndependentSampler)
    assert isinstance(worker.model_runner.rejection_sampler, IndependentRejectionSampler)
    assert worker.model_runner.rejection_sampler.sampler is worker.model_runner.sampler


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(RejectionSampler, AskedTokensRejectionSampler), (object, object)],
    ids=["with a sampler that the defect is in", "with another one"],
)
def test_a_request_may_ask_for_logprob_tokens_if_vllm_drafts(theirs: Any, ours: type) -> None:
    class Drafting(OneOfManyRanks):
        def init_device(self) -> None:
            super().init_device()
            given = () if theirs is object else (self.model_runner.sampler, SPECULATION)
            self.model_runner.rejection_sampler = theirs(*given)

    class InEngine(InEngineMixin, Drafting):
        pass

    worker = InEngine()
    worker.init_device()
    runner: Any = worker.model_runner
    verifying = type(runner.rejection_sampler)
    assert verifying is ours
    if ours is not object:
        assert type(runner.sampler) is AskedTokensSampler
        assert runner.rejection_sampler.sampler is runner.sampler


@pytest.mark.parametrize("has_inner_state", [False, True])
def test_only_a_step_with_drafts_runs_as_speculation(has_inner_state: bool) -> None:
    worker = Worker()
    worker.has_inner_state = has_inner_state
    worker.init_device()
    runner = worker.model_runner
    with_drafts = SimpleNamespace(scheduled_spec_decode_tokens={"a": [1]})
    without = SimpleNamespace(scheduled_spec_decode_tokens={})
    assert runner._prepare_inputs(with_drafts, None) is SPECULATION
    assert runner._prepare_inputs(without, None) is (SPECULATION if has_inner_state else None)
    assert runner.speculative_config is SPECULATION


def test_every_rank_captures_the_same_graphs() -> None:
    worker = Worker()
    worker.init_device()
    assert worker.model_runner.uniform_decode_query_len == 1
    assert worker.model_runner.cudagraph_dispatcher.uniform_decode_query_len == 1


def test_a_rank_that_does_not_draft_returns_empty_results() -> None:
    worker = Worker()
    worker.init_device()
    assert worker.model_runner.propose_draft_token_ids(None, [[1], [2]], None) == [[], []]
    assert worker.call_hook("snapshot") is None


class Hook(ProposerHook):
    """The hook of a rank that drafts, reduced to the calls that a worker makes."""

    def __init__(self, worker: Worker) -> None:
        self.is_warm = threading.Event()
        self._exits = [lambda: self.seen.append(worker.is_shut_down)]
        self.seen: list[bool] = []
        self.idle_steps: list[list[list[int]]] = []
        self._outcomes = {}

    def forget(self, request_ids: object) -> None:
        """Nothing is kept."""

    def is_idle(self, scheduler_output: Any) -> bool:
        return bool(scheduler_output.is_idle)

    def note_idle_step(self, sampled_token_ids: list[list[int]]) -> None:
        self.idle_steps.append(sampled_token_ids)


def test_the_hook_is_marked_warm_after_the_workers_warm_up() -> None:
    worker = Worker()
    assert worker.compile_or_warm_up_model() == "times"  # of a rank that does not draft
    worker._hook = hook = Hook(worker)
    assert not hook.is_warm.is_set()
    assert worker.compile_or_warm_up_model() == "times"
    assert hook.is_warm.is_set()


def test_the_sources_are_closed_once_before_the_worker_shuts_down() -> None:
    worker = Worker()
    worker._hook = hook = Hook(worker)
    worker.shutdown()
    assert worker.is_shut_down
    worker.shutdown()
    assert hook.seen == [False]


def test_a_worker_that_never_started_can_be_shut_down() -> None:
    worker = Worker()
    worker.shutdown()
    assert worker.is_shut_down


def test_an_idle_step_runs_without_speculation() -> None:
    worker = Worker()
    worker.init_device()
    worker._hook = hook = Hook(worker)

    worker.execute_model(SimpleNamespace(finished_req_ids=(), is_idle=True))
    output = worker.sample_tokens(None)
    assert worker.taken_with == [None, None]
    assert output.specserve_drafts is None
    assert hook.idle_steps == [[[7]]]

    assert output.specserve_outcomes == {}

    hook._outcomes = {"a": ("ngram", 2, 1)}
    worker.execute_model(SimpleNamespace(finished_req_ids=(), is_idle=False))
    output = worker.sample_tokens(None)
    assert output.specserve_outcomes == {"a": ("ngram", 2, 1)}
    assert worker.taken_with == [SPECULATION, SPECULATION]
    assert output.specserve_drafts == DraftTokenIds(["a"], [[1]])
    assert len(hook.idle_steps) == 1


def test_our_loggers_have_the_level_and_handlers_of_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = logging.getLogger("specserve"), logging.getLogger("vllm")
    for name in ("level", "handlers"):
        monkeypatch.setattr(ours, name, type(getattr(ours, name))())
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "level", logging.DEBUG)
    worker = Worker()
    worker.init_device()
    logging.getLogger("specserve.policy.chain").debug("a step")
    assert written == ["a step"]


def test_a_cpu_worker_without_sources_reports_asked_tokens_by_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = import_module("specserve.engine.cpu.worker")  # changes torch's settings

    for name in _REPAIRS:
        monkeypatch.setattr(module, name, lambda **_: None)
    worker: Any = object.__new__(module.CpuWorker)
    worker.model_config = SimpleNamespace(enforce_eager=True)
    worker.model_runner = SimpleNamespace(sampler=Sampler("raw_logits"))
    monkeypatch.setattr(module.CPUWorker, "init_device", lambda _: None)
    worker.init_device()
    assert type(worker.model_runner.sampler) is AskedTokensSampler
    assert worker.model_runner.sampler.logprobs_mode == "raw_logits"
