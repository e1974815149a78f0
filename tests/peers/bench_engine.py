"""One engine, without HTTP: no speculation, our sources without a model, vLLM's own methods.

    python -m tests.peers engine [--rounds 4] [--sets again,code,random]

All engines live at the same time in separate processes. They take turns, so that other load on the
machine affects all of them. A ratio is taken within a turn; tables have its median. Each round has
new prompts, since a memory would know earlier ones. Prompts of ``again`` are about the same files.
``accepted`` is accepted tokens per draft. "Our kernels" are our CPU kernels in vLLM's engine.

The peer needs ``pip install --no-deps arctic-inference==0.1.1``.
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

from specserve.compare.comparison import warm_up
from specserve.compare.corpus import Module
from specserve.compare.engine_process import EngineProcess
from specserve.compare.machine import circumstances
from specserve.compare.prompts import Tokenizer, configured_tokenizer, load_prompts
from specserve.compare.report import median_first_token_seconds, median_tokens_per_second, totals
from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError
from specserve.core.source_config import NgramConfig
from specserve.engine.generation import Job, RunResult, Sampling
from specserve.engine.methods import parse_method
from specserve.serve.config_file import read
from tests.peers.jobs import again_jobs, files_of_again, random_jobs

CONCURRENCIES = (1, 8)
MIN_JOBS = 4
"""Minimum number of jobs of a set and round."""

KV_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table."""

    name: str
    method: str
    config: AppConfig
    on_our_kernels: bool = False


def contenders(config: AppConfig) -> list[Contender]:
    """No speculation, ours without and with a memory, vLLM's two methods without a model."""
    if not {"ngram", "trie"} <= {source.kind for source in config.speculation}:
        raise ConfigError("speculation", [], "sources of the kinds ngram and trie")
    usual = NgramConfig(
        kind="ngram", max_draft_len=5, min_matching_ngram_size=2, max_matching_ngram_size=3
    )
    with_usual = config.model_copy(update={"speculation": (usual,)})
    return [
        Contender("none", "none", config),
        Contender("ngram", "ngram", config),
        Contender("ngram+trie", "ngram+trie", config),
        Contender("vLLM ngram (k=5, 2..3)", "vllm-ngram", with_usual),
        Contender("the same, our kernels", "vllm-ngram", with_usual, on_our_kernels=True),
        Contender("vLLM suffix (k=16)", "vllm-suffix:16", config),
        Contender("suffix, our kernels", "vllm-suffix:16", config, on_our_kernels=True),
    ]


def measured_config(path: Path) -> AppConfig:
    """The file's application, with a KV cache small enough for several engines."""
    config = read(path).applications[0].config
    engine = config.engine.model_copy(update={"kv_cache_memory_bytes": KV_CACHE_BYTES})
    return config.model_copy(update={"engine": engine})


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table per concurrency and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--sets", default="random,code,again", help="prompt sets")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    console = Console()
    config = measured_config(args.config)
    tokenizer = configured_tokenizer(config)
    files = files_of_again(args.seed)
    rounds = [
        {
            name: _jobs(name, tokenizer, files, args.num_prompts, args.max_tokens, seed)
            for name in args.sets.split(",")
        }
        for seed in range(args.seed, args.seed + args.rounds)
    ]
    rows = compare(console, contenders(config), rounds)
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
    """Measures, and prints a table per concurrency.

    Args:
        console: console for tables and progress.
        entrants: the contenders. The others are compared with the first and the last one.
        rounds: jobs of each set, for each round. A turn runs as many jobs as run at once.
        concurrencies: numbers of jobs that run at once. The largest one runs all jobs. The others
            run ``MIN_JOBS``, or as many as run at once.

    Returns:
        A row for each set, contender and concurrency.
    """
    return report(console, entrants, measure(console, entrants, rounds, concurrencies))


Key = tuple[str, int, str]
"""Prompt set, concurrency, contender."""


def report(
    console: Console, entrants: Sequence[Contender], results: Mapping[Key, Sequence[RunResult]]
) -> list[dict[str, Any]]:
    """Prints a table per concurrency. Returns a row for each set, contender and concurrency."""
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
) -> dict[Key, list[RunResult]]:
    """A result for each turn, of as many jobs as run at once."""
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
                warm_up(engines[-1], next(iter(rounds[0].values())), concurrency)
            bars.advance(loading)
        total = len(rounds) * len(rounds[0]) * len(concurrencies)
        bar = bars.add_task("measuring", total=total)
        for sets in rounds:
            turns = list(zip(entrants, engines, strict=True))
            for name, jobs in sets.items():
                for concurrency in concurrencies:
                    # A turn has just enough jobs to keep the engine busy. So contenders run within
                    # seconds of each other, while the machine's speed changes within minutes.
                    num_jobs = min(max(MIN_JOBS, concurrency), len(jobs))
                    for begin in range(0, num_jobs, concurrency):
                        few = jobs[begin : begin + concurrency]
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
        base, last = (results[name, concurrency, entrants[i].name] for i in (0, -1))
        for entrant in entrants:
            passes = results[name, concurrency, entrant.name]
            ratios, over_last = _ratios(passes, base), _ratios(passes, last)
            num_drafts, drafted, accepted = totals(passes)
            rows.append(
                {
                    "set": name,
                    "concurrency": concurrency,
                    "method": entrant.name,
                    "tokens_per_second": round(median_tokens_per_second(passes), 2),
                    "ratio": round(median(ratios), 3),
                    "ratios": [round(ratio, 3) for ratio in ratios],
                    "over_last": round(median(over_last), 3),
                    "each_over_last": [round(ratio, 3) for ratio in over_last],
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


def _ratios(passes: Sequence[RunResult], others: Sequence[RunResult]) -> list[float]:
    pairs = zip(passes, others, strict=True)
    return [one.tokens_per_second / other.tokens_per_second for one, other in pairs]


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def print_table(console: Console, concurrency: int, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"One engine, concurrency {concurrency}")
    table.add_column("set")
    table.add_column("method", no_wrap=True)
    for column in ("tok/s", "x none", "x last", "first token", "a draft"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["set"],
            row["method"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['over_last']:.2f}",
            f"{row['first_token_seconds'] * 1000:.0f} ms",
            f"{row['accepted_per_draft']:.2f}" if row["drafts"] else "",
            end_section=row is rows[-1] or rows[rows.index(row) + 1]["set"] != row["set"],
        )
    console.print(table)


def _jobs(
    name: str,
    tokenizer: Tokenizer,
    files: Sequence[Module],
    number: int,
    max_tokens: int,
    seed: int,
) -> list[Job]:
    if name == "random":
        return random_jobs(number, max_tokens, seed)
    if name == "again":
        return again_jobs(tokenizer, files, number, max_tokens, seed)
    prompts = load_prompts(name, tokenizer, num_prompts=number, seed=seed)
    return [Job(prompt.token_ids, Sampling(max_tokens=max_tokens)) for prompt in prompts]


if __name__ == "__main__":
    raise SystemExit(main())
