"""One engine, without HTTP: no speculation, our prompt lookup, vLLM's own.

All engines live at the same time, each in a process of its own, and take turns, so that what else
the machine does meets all of them; a ratio is taken within a turn, and its median over the turns
is shown. Greedy, every round the same prompts. ``accepted`` is accepted tokens a draft.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specserve.compare.comparison import WARM_UP_TOKENS
from specserve.compare.engine_process import EngineProcess
from specserve.compare.machine import circumstances
from specserve.compare.prompts import BUILT_IN, Prompt, load_prompts, load_tokenizer
from specserve.compare.report import median_first_token_seconds, median_tokens_per_second, totals
from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError
from specserve.core.source_config import NgramConfig
from specserve.engine.generation import Job, RunResult, Sampling
from specserve.engine.methods import parse_method
from specserve.serve.config_file import read

CONCURRENCIES = (1, 8)
LEAST_JOBS = 4
"""Jobs of a set and round, where fewer run at once."""

KV_CACHE_BYTES = 256 << 20
MAX_TOKENS = {"code": 128}
"""Tokens a prompt by set; :data:`OTHER_MAX_TOKENS` for the others."""
OTHER_MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table."""

    name: str
    method: str
    config: AppConfig
    on_our_kernels: bool = False


def contenders(config: AppConfig) -> list[Contender]:
    """No speculation; ours as configured; vLLM's with its usual settings, and with ours."""
    ours = next((s for s in config.speculation if s.kind == "ngram"), None)
    if ours is None:
        raise ConfigError("speculation", [], "a source of the kind ngram, for this benchmark")
    usual = NgramConfig(
        kind="ngram", max_draft_len=5, min_matching_ngram_size=2, max_matching_ngram_size=3
    )
    settings = (
        f"k={ours.max_draft_len}, {ours.min_matching_ngram_size}..{ours.max_matching_ngram_size}"
    )
    always = ours.model_copy(update={"dynamic": False})
    return [
        Contender("none", "none", config),
        Contender(f"ngram ({settings})", "ngram", config),
        Contender(f"ngram, no gate ({settings})", "ngram", _with(config, always)),
        Contender("vLLM ngram (k=5, 2..3)", "vllm-ngram", _with(config, usual)),
        Contender(f"vLLM ngram ({settings})", "vllm-ngram", config),
    ]


def measured_config(path: Path) -> AppConfig:
    """A file's application, with a KV cache that leaves room for several engines."""
    config = read(path).applications[0].config
    engine = config.engine.model_copy(update={"kv_cache_memory_bytes": KV_CACHE_BYTES})
    return config.model_copy(update={"engine": engine})


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table a concurrency and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--sets", default=",".join(BUILT_IN), help="prompt sets")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=0, help="default: 128 of code, 64 else")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    console = Console()
    config = measured_config(args.config)
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.revision)
    prompts = {
        name: load_prompts(name, tokenizer, num_prompts=args.num_prompts, seed=args.seed)
        for name in args.sets.split(",")
    }
    entrants = contenders(config)
    jobs = {
        name: _jobs(of_set, args.max_tokens or MAX_TOKENS.get(name, OTHER_MAX_TOKENS))
        for name, of_set in prompts.items()
    }
    rows = compare(console, entrants, [jobs] * args.rounds)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "rows": rows}
    print(json.dumps({"benchmark": "engine", **circumstances(), **document}))
    return 0


def compare(
    console: Console,
    entrants: Sequence[Contender],
    rounds: Sequence[Mapping[str, list[Job]]],
    concurrencies: Sequence[int] = CONCURRENCIES,
) -> list[dict[str, Any]]:
    """Measures, and prints a table a concurrency.

    Args:
        console: where tables and progress go.
        entrants: what is compared; the first is what the others are compared to.
        rounds: the jobs of each set, for each round; a turn takes as many of them as run at once.
        concurrencies: how many run at once; all jobs are run at the largest, ``LEAST_JOBS`` or as
            many as run at once at the others.

    Returns:
        A row for each set, contender and concurrency.
    """
    return report(console, entrants, measure(console, entrants, rounds, concurrencies))


Key = tuple[str, int, str]
"""Prompt set, concurrency, contender."""


def report(
    console: Console, entrants: Sequence[Contender], results: Mapping[Key, Sequence[RunResult]]
) -> list[dict[str, Any]]:
    """Prints a table a concurrency; a row for each set, contender and concurrency."""
    names = dict.fromkeys(key[0] for key in results)
    rows = [row for name in names for row in summarise(entrants, name, results)]
    for concurrency in sorted({row["concurrency"] for row in rows}):
        print_table(console, concurrency, [r for r in rows if r["concurrency"] == concurrency])
    return rows


def measure(
    console: Console,
    entrants: Sequence[Contender],
    rounds: Sequence[Mapping[str, list[Job]]],
    concurrencies: Sequence[int],
    least_jobs: int = LEAST_JOBS,
    waves: int = 1,
) -> dict[Key, list[RunResult]]:
    """A result a turn: of one job, or of ``waves`` times as many as run at once."""
    results: dict[Key, list[RunResult]] = defaultdict(list)
    with ExitStack() as stack:
        bars = stack.enter_context(Progress(console=console))
        loading = bars.add_task("loading engines", total=len(entrants))
        engines: list[EngineProcess] = []
        for entrant in entrants:
            method = replace(
                parse_method(entrant.method, entrant.config), on_our_kernels=entrant.on_our_kernels
            )
            engines.append(stack.enter_context(EngineProcess(entrant.config, method)))
            engines[-1].wait_ready()
            for concurrency in concurrencies:
                _warm_up(engines[-1], next(iter(rounds[0].values())), concurrency)
            bars.advance(loading)
        total = len(rounds) * len(rounds[0]) * len(concurrencies)
        bar = bars.add_task("measuring", total=total)
        for sets in rounds:
            turns = list(zip(entrants, engines, strict=True))
            for name, jobs in sets.items():
                for concurrency in concurrencies:
                    # As few jobs a turn as keep the engine busy: what is compared is run within
                    # seconds, on a machine whose speed changes within minutes.
                    size = waves * concurrency if concurrency > 1 else 1
                    num_jobs = min(max(least_jobs, size), len(jobs))
                    for begin in range(0, num_jobs, size):
                        few = jobs[begin : begin + size]
                        for entrant, engine in turns:
                            results[name, concurrency, entrant.name].append(
                                engine.run(few, concurrency)
                            )
                        turns = turns[1:] + turns[:1]
                    bars.advance(bar)
    return results


def summarise(
    entrants: Sequence[Contender], name: str, results: Mapping[Key, Sequence[RunResult]]
) -> list[dict[str, Any]]:
    """A row for each contender and concurrency."""
    rows = []
    for concurrency in sorted({key[1] for key in results}):
        base = results[name, concurrency, entrants[0].name]
        for entrant in entrants:
            passes = results[name, concurrency, entrant.name]
            ratios = [
                one.tokens_per_second / other.tokens_per_second
                for one, other in zip(passes, base, strict=True)
            ]
            num_drafts, drafted, accepted = totals(passes)
            rows.append(
                {
                    "set": name,
                    "concurrency": concurrency,
                    "method": entrant.name,
                    "tokens_per_second": round(median_tokens_per_second(passes), 2),
                    "ratio": round(median(ratios), 3),
                    "ratios": [round(ratio, 3) for ratio in ratios],
                    "first_token_seconds": round(median_first_token_seconds(passes), 4),
                    "drafts": num_drafts,
                    "drafted_tokens": drafted,
                    "accepted_tokens": accepted,
                    "drafted_at_position": _sums(
                        each.drafted_at_position for one in passes for each in one.drafts
                    ),
                    "accepted_at_position": _sums(
                        each.accepted_at_position for one in passes for each in one.drafts
                    ),
                    "accepted_per_draft": round(accepted / num_drafts, 3) if num_drafts else 0.0,
                }
            )
    return rows


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def print_table(console: Console, concurrency: int, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"One engine, concurrency {concurrency}")
    table.add_column("set")
    table.add_column("method", no_wrap=True)
    for column in ("tok/s", "x none", "first token", "a draft"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["set"],
            row["method"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['first_token_seconds'] * 1000:.0f} ms",
            f"{row['accepted_per_draft']:.2f}" if row["drafts"] else "",
            end_section=row is rows[-1] or rows[rows.index(row) + 1]["set"] != row["set"],
        )
    console.print(table)


def _warm_up(engine: EngineProcess, jobs: Sequence[Job], concurrency: int) -> None:
    sampling = Sampling(max_tokens=WARM_UP_TOKENS)
    few = jobs[: max(2, concurrency)]
    engine.run([Job(job.prompt_token_ids, sampling) for job in few], concurrency)


def _jobs(prompts: Sequence[Prompt], max_tokens: int) -> list[Job]:
    return [Job(prompt.token_ids, Sampling(max_tokens=max_tokens)) for prompt in prompts]


def _with(config: AppConfig, source: NgramConfig) -> AppConfig:
    return config.model_copy(update={"speculation": (source,)})


if __name__ == "__main__":
    raise SystemExit(main())
