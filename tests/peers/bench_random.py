"""What drafting costs where nothing can be foreseen: random tokens, continued at temperature 1.

    python -m tests.peers random [--restarts 6]

Two engines without speculation differ by some percent, and keep their difference for as long as
they live. So there are two of them, what drafts is compared to the mean of both in the same turn,
and all three are started anew several times, each time in another order. The last column is one
engine without speculation over the other: what the machine does by itself.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from specserve.compare.machine import circumstances
from specserve.engine.generation import RunResult
from tests.peers.bench_engine import CONCURRENCIES, Contender, measure, measured_config
from tests.peers.bench_memory import RANDOM_VOCAB, random_jobs

PLAIN, OTHER = "none", "none, again"
MAX_TOKENS = 64


def ratios(
    results: Mapping[tuple[str, int, str], Sequence[RunResult]], concurrency: int, method: str
) -> tuple[float, float]:
    """Medians of one start's turns: the method over both plain engines, and these to each other."""
    drafting, plain, other = (
        [run.tokens_per_second for run in results["random", concurrency, name]]
        for name in (method, PLAIN, OTHER)
    )
    over_plain = [2 * d / (p + o) for d, p, o in zip(drafting, plain, other, strict=True)]
    return median(over_plain), median(o / p for p, o in zip(plain, other, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row a start and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--method", default="ngram+trie")
    parser.add_argument("--restarts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3, help="of 8 prompts, at each start")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    console = Console()
    config = measured_config(args.config)
    entrants = [
        Contender(PLAIN, "none", config),
        Contender(args.method, args.method, config),
        Contender(OTHER, "none", config),
    ]
    table = Table(title=f"{args.method} on random text")
    for column in ("start", "concurrency", "x none", "none x none"):
        table.add_column(column, justify="right")
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for start in range(args.restarts):
        seeds = range(args.seed + start * args.rounds, args.seed + (start + 1) * args.rounds)
        rounds = [{"random": random_jobs(RANDOM_VOCAB, 8, MAX_TOKENS, seed)} for seed in seeds]
        results = measure(console, entrants, rounds, CONCURRENCIES, least_jobs=8)
        entrants = entrants[1:] + entrants[:1]
        for concurrency in CONCURRENCIES:
            pair = ratios(results, concurrency, args.method)
            found[concurrency].append(pair)
            table.add_row(str(start + 1), str(concurrency), *(f"{each:.3f}" for each in pair))
    for concurrency in CONCURRENCIES:
        medians = [median(column) for column in zip(*found[concurrency], strict=True)]
        table.add_row("median", str(concurrency), *(f"{each:.3f}" for each in medians))
    console.print(table)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "ratios": found}
    print(json.dumps({"benchmark": "random", **circumstances(), **document}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
