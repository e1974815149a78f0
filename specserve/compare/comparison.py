"""Runs the same prompts under several methods and tells what each makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from rich.console import Console

from specserve.compare.display import progress_bar
from specserve.compare.engine_process import EngineProcess
from specserve.compare.lossless import Verdict, judge
from specserve.compare.prompts import Prompt
from specserve.core.config import AppConfig
from specserve.engine.generation import Job, RunResult, Sampling
from specserve.engine.methods import Method

WARM_UP_TOKENS = 32
"""Tokens that each prompt of the warm-up is continued by; their time is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to run: ``repeat`` passes over the prompts, ``concurrency`` of them at a time.

    Only at ``temperature`` 0, which is greedy, outputs are compared. Each prompt's seed is its own,
    counted from ``seed``. ``tolerance`` is the largest gap of a near tie, in nats.
    """

    max_tokens: int
    tolerance: float
    concurrency: int = 1
    temperature: float = 0.0
    seed: int = 0
    repeat: int = 1


@dataclass(slots=True, kw_only=True)
class Comparison:
    """All results, by method in the order asked for.

    Attributes:
        prompts: what was asked.
        settings: how.
        passes: one result a pass.
        verdicts: of the methods compared with the reference; empty without ``none``, or where
            sampled.
    """

    prompts: Sequence[Prompt]
    settings: Settings
    passes: dict[Method, list[RunResult]]
    verdicts: dict[Method, Verdict]

    @property
    def is_lossless(self) -> bool:
        """Nothing that was checked has failed."""
        return all(verdict.is_lossless for verdict in self.verdicts.values())


def compare(
    config: AppConfig,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    settings: Settings,
    console: Console,
    reference: Method,
) -> Comparison:
    """Runs each method in an engine of its own, one after another, ``none`` last.

    Last, because that engine then decides about the differences from ``reference``, one of the
    methods.

    Raises:
        EngineError: an engine did not start or died; nothing is left running.
    """
    found: dict[Method, list[RunResult]] = {}
    verdicts: dict[Method, Verdict] = {}
    for method in sorted(methods, key=lambda m: m.is_none):
        with EngineProcess(config, method) as engine:
            with console.status(f"{method}: loading the model"):
                engine.wait_ready()
            found[method] = _passes(engine, prompts, settings, console)
            if method.is_none and settings.temperature == 0:
                verdicts = _judge(engine, prompts, found, settings, reference)
    return Comparison(
        prompts=prompts,
        settings=settings,
        passes={method: found[method] for method in methods},
        verdicts={method: verdicts[method] for method in methods if method in verdicts},
    )


def jobs_of(prompts: Sequence[Prompt], settings: Settings) -> list[Job]:
    """One job a prompt."""
    greedy = settings.temperature == 0
    return [
        Job(
            prompt.token_ids,
            Sampling(
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                seed=None if greedy else settings.seed + index,
                prediction=prompt.prediction,
                json_schema=prompt.json_schema,
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


def warm_up(engine: EngineProcess, jobs: Sequence[Job], concurrency: int) -> None:
    """Lets everything be compiled and touched that is compiled or touched on first use."""
    sampling = Sampling(max_tokens=WARM_UP_TOKENS)
    few = jobs[: max(2, concurrency)]
    engine.run([Job(job.prompt_token_ids, sampling) for job in few], concurrency)


def _passes(
    engine: EngineProcess, prompts: Sequence[Prompt], settings: Settings, console: Console
) -> list[RunResult]:
    jobs = jobs_of(prompts, settings)
    warm_up(engine, jobs, settings.concurrency)
    passes: list[RunResult] = []
    for _ in range(settings.repeat):
        with progress_bar(console, str(engine.method), len(jobs)) as progress:
            passes.append(engine.run(jobs, settings.concurrency, progress))
            progress(len(jobs), passes[-1].num_tokens)
    return passes


def _judge(
    none: EngineProcess,
    prompts: Sequence[Prompt],
    found: dict[Method, list[RunResult]],
    settings: Settings,
    reference: Method,
) -> dict[Method, Verdict]:
    """Every pass of every other method against the first one of ``reference``."""
    expected = found[reference][0].completions
    return {
        method: judge(
            [prompt.token_ids for prompt in prompts] * len(passes),
            expected * len(passes),
            list(chain.from_iterable(one.completions for one in passes)),
            score=lambda jobs: none.run(jobs, settings.concurrency),
            tolerance=settings.tolerance,
        )
        for method, passes in found.items()
        if method != reference
    }
