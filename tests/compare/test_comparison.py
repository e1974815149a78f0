from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from specserve.compare import comparison
from specserve.compare.comparison import Comparison, Settings, compare, warm_up
from specserve.compare.prompts import Prompt
from specserve.compare.report import document
from specserve.core.config import parse
from specserve.core.errors import EngineError
from specserve.engine.generation import Completion, Job, RunResult, Sampling
from specserve.engine.methods import NONE, Method

NGRAM = Method("ngram")
CONFIG = parse({"model": {"path": "m"}, "speculation": [{"kind": "ngram"}]})


class Engine:
    """Records the jobs that it is given."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def run(self, jobs: list[Job], concurrency: int) -> None:
        self.jobs += jobs


def test_no_measured_prompt_is_remembered_from_the_warm_up() -> None:
    engine: Any = Engine()
    jobs = [Job((number, 7, 8), Sampling(max_tokens=4)) for number in range(5)]
    warm_up(engine, jobs, concurrency=3)
    assert [job.prompt_token_ids for job in engine.jobs] == [(8, 7, 0), (8, 7, 1), (8, 7, 2)]


class Started:
    """An engine that answers with one token, and is in the list of all engines."""

    all: list[Started]
    token = 5

    def __init__(self, config: object, method: Method) -> None:
        self.method, self.num_runs = method, 0
        self.all.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_ready(self) -> None:
        pass

    def run(self, jobs: list[Job], *_: object) -> RunResult:
        self.num_runs += 1
        done = Completion(
            text="",
            token_ids=(self.token,),
            finish_reason="length",
            seconds=1.0,
            token_seconds=(0.1,),
            logprobs=({5: -6.0, 6: -6.05, 9: -0.01},),
        )
        return RunResult(completions=(done,) * len(jobs), seconds=1.0, drafts=())


class Improbable(Started):
    """With draft sources it answers with a token that the model hardly ever chooses."""

    def __init__(self, config: object, method: Method) -> None:
        super().__init__(config, method)
        self.token = 5 if method.name == NONE else 6


class Broken(Started):
    """Without draft sources it does not start."""

    def wait_ready(self) -> None:
        if self.method.is_none:
            raise EngineError("out of memory")


unfinished: list[Comparison] = []


def compared(
    monkeypatch: pytest.MonkeyPatch, engine: type[Started], second: Prompt, repeat: int = 1
) -> Comparison:
    """``none`` and :data:`NGRAM` compared with two prompts; :attr:`Started.all` has the engines."""
    monkeypatch.setattr(comparison, "EngineProcess", engine)
    monkeypatch.setattr(Started, "all", [], raising=False)
    methods = [Method(NONE), NGRAM]
    prompts = [Prompt("a", (7, 8)), second]
    settings = Settings(max_tokens=4, tolerance=0.1, repeat=repeat)
    with Path("/dev/null").open("w") as nowhere:
        console = Console(file=nowhere)
        return compare(CONFIG, methods, prompts, settings, console, methods[0], unfinished.append)


def test_each_pass_has_an_engine_of_its_own_and_none_comes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = compared(monkeypatch, Started, Prompt("b", (9,)), repeat=2)
    assert [str(each.method) for each in Started.all] == ["ngram", "ngram", "none", "none"]
    assert {each.num_runs for each in Started.all} == {2}  # the warm-up and the pass
    assert {method: len(passes) for method, passes in found.passes.items()} == dict.fromkeys(
        [Method(NONE), NGRAM], 2
    )
    assert found.verdicts[NGRAM].num_identical == 4
    assert not unfinished


def test_finished_passes_are_saved_if_a_later_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError):
        compared(monkeypatch, Broken, Prompt("b", (9,)), repeat=2)
    saved = unfinished.pop()
    assert {method: len(passes) for method, passes in saved.passes.items()} == {NGRAM: 2}
    assert document(saved, CONFIG, "own")["lossless"] is None


def test_improbable_tokens_are_near_ties_only_where_a_schema_may_forbid_the_probable_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = compared(monkeypatch, Improbable, Prompt("b", (9,), json_schema="{}"))
    verdict = found.verdicts[NGRAM]
    assert [each.prompt for each in verdict.near_ties] == [1]
    assert [each.prompt for each in verdict.failures] == [0]
