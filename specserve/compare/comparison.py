"""Runs the same prompts under several methods and collects results and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from rich.console import Console

from specserve.compare.display import progress_bar
from specserve.compare.engine_process import EngineProcess
from specserve.compare.lossless import Verdict, default_tolerance, judge
from specserve.compare.prompts import Prompt
from specserve.core.config import AppConfig
from specserve.core.errors import SpecServeError
from specserve.engine.generation import Job, RunResult, Sampling
from specserve.engine.methods import NONE, Method

WARM_UP_TOKENS = 32
"""Output tokens of each warm-up prompt. Their time is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to run: ``repeat`` passes over the prompts, ``concurrency`` prompts at a time.

    Outputs are compared only at ``temperature`` 0 (greedy). Prompt i is sampled with ``seed + i``.
    ``tolerance`` is the largest gap of a near tie, in nats.
    """

    max_tokens: int
    tolerance: float
    concurrency: int = 1
    temperature: float = 0.0
    seed: int = 0
    repeat: int = 1


@dataclass(slots=True, kw_only=True)
class Comparison:
    """All results, by method in the order in which the user named the methods.

    Attributes:
        prompts: the same for all methods.
        settings: the same for all methods.
        passes: one result per pass.
        verdicts: for each method but the reference; empty without ``none`` or with sampling.
        against_none: for the other methods, with ``none`` as the reference and the model type's
            tolerance; empty if ``none`` is the reference anyway.
    """

    prompts: Sequence[Prompt]
    settings: Settings
    passes: dict[Method, list[RunResult]]
    verdicts: dict[Method, Verdict]
    against_none: dict[Method, Verdict] = field(default_factory=dict)

    @property
    def is_lossless(self) -> bool:
        """True if no verdict has a failure."""
        return all(verdict.is_lossless for verdict in self.verdicts.values())


def compare(
    config: AppConfig,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    settings: Settings,
    console: Console,
    reference: Method,
    save: Callable[[Comparison], None],
) -> Comparison:
    """Runs each pass of each method in an engine of its own, one after another.

    A method may remember earlier passes, so each starts with an empty memory. ``none`` runs last:
    its engine then scores where outputs differ from those of ``reference``, which is one of the
    methods.

    Args:
        save: called with the finished passes if a later one fails or is interrupted.

    Raises:
        EngineError: an engine did not start or died; no process keeps running.
    """
    found: dict[Method, list[RunResult]] = {method: [] for method in methods}
    verdicts: dict[Method, Verdict] = {}
    against_none: dict[Method, Verdict] = {}
    runs = [(method, number) for method in methods for number in range(settings.repeat)]
    last = Method(NONE), settings.repeat - 1
    try:
        for method, number in sorted(runs, key=lambda run: run[0].is_none):
            with EngineProcess(config, method) as engine:
                with console.status(f"{method}: loading the model"):
                    engine.wait_ready()
                found[method].append(_pass(engine, prompts, settings, console))
                if (method, number) == last and settings.temperature == 0:
                    verdicts = _judge(engine, prompts, found, settings, reference)
                    if reference != method:
                        own = replace(settings, tolerance=default_tolerance(config.engine.dtype))
                        ours = {each: found[each] for each in methods if each != reference}
                        against_none = _judge(engine, prompts, ours, own, method)
    except (SpecServeError, KeyboardInterrupt):
        finished = {method: passes for method, passes in found.items() if passes}
        if finished:
            save(Comparison(prompts=prompts, settings=settings, passes=finished, verdicts={}))
        raise
    return Comparison(
        prompts=prompts,
        settings=settings,
        passes={method: found[method] for method in methods},
        verdicts={method: verdicts[method] for method in methods if method in verdicts},
        against_none=against_none,
    )


def jobs_of(prompts: Sequence[Prompt], settings: Settings) -> list[Job]:
    """One job per prompt, with its sampling parameters."""
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
    """Runs a few jobs, so that compilation and first memory accesses are not measured.

    Their prompts are reversed, so that no method remembers what is measured.
    """
    sampling = Sampling(max_tokens=WARM_UP_TOKENS)
    few = jobs[: max(2, concurrency)]
    engine.run([Job(job.prompt_token_ids[::-1], sampling) for job in few], concurrency)


def _pass(
    engine: EngineProcess, prompts: Sequence[Prompt], settings: Settings, console: Console
) -> RunResult:
    jobs = jobs_of(prompts, settings)
    warm_up(engine, jobs, settings.concurrency)
    with progress_bar(console, str(engine.method), len(jobs)) as progress:
        result = engine.run(jobs, settings.concurrency, progress)
        progress(len(jobs), result.num_tokens)
    return result


def _judge(
    none: EngineProcess,
    prompts: Sequence[Prompt],
    found: dict[Method, list[RunResult]],
    settings: Settings,
    reference: Method,
) -> dict[Method, Verdict]:
    """Compares every pass of every other method with the first pass of ``reference``."""
    expected = found[reference][0].completions
    return {
        method: judge(
            [prompt.token_ids for prompt in prompts] * len(passes),
            expected * len(passes),
            list(chain.from_iterable(one.completions for one in passes)),
            score=lambda jobs: none.run(jobs, settings.concurrency),
            tolerance=settings.tolerance,
            constrained={
                index for index, prompt in enumerate([*prompts] * len(passes)) if prompt.json_schema
            },
        )
        for method, passes in found.items()
        if method != reference
    }
