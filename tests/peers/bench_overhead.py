"""What speculation costs where nothing can be foreseen: one engine, with it and without.

    python -m tests.peers overhead [--turns 24]

As ``random``, but within one process: between the turns speculation is switched off and on. Two
engines differ by some percent whatever they are, which is more than what is measured here; what
differs between two processes is not seen.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track

from specserve.compare.machine import circumstances
from tests.peers.bench_engine import CONCURRENCIES, measured_config
from tests.peers.bench_memory import RANDOM_VOCAB, random_jobs
from tests.peers.bench_random import MAX_TOKENS
from tests.peers.in_process import SpeculationSwitch, relaunched, worker_of
from tests.peers.tables import print_rows

# What loads vLLM is imported where it is used: the environment has to be set before.

JOBS = {1: 2, 8: 8}
"""Of a turn, by concurrency."""


def measure(method: str, path: Path, turns: int) -> list[dict[str, Any]]:
    """A row for each concurrency; the engine runs in this process."""
    from specserve.engine.methods import parse_method
    from specserve.engine.offline import OfflineEngine

    config = measured_config(path)
    engine = OfflineEngine(config, parse_method(method, config))
    switch = SpeculationSwitch(worker_of(engine))
    states = {"speculation": True, "no speculation": False}
    rows = []
    for concurrency in CONCURRENCIES:
        seconds: dict[str, list[float]] = {name: [] for name in states}
        order = list(states.items())
        for turn in track(range(turns + 1), f"concurrency {concurrency}"):
            jobs = random_jobs(RANDOM_VOCAB, JOBS[concurrency], MAX_TOKENS, turn)
            for name, is_on in order:
                switch(is_on=is_on)
                seconds[name].append(engine.run(jobs, concurrency, lambda *_: None).seconds)
            order = order[1:] + order[:1]
        base = seconds["no speculation"]
        for name, found in seconds.items():
            ratios = [b / each for b, each in zip(base[1:], found[1:], strict=True)]
            rows.append(
                {
                    "concurrency": concurrency,
                    "engine": name,
                    "seconds": round(median(found[1:]), 3),
                    "speed": round(median(ratios), 3),
                }
            )
    engine.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--method", default="ngram+trie")
    parser.add_argument("--turns", type=int, default=24)
    args = parser.parse_args(argv)
    module = "tests.peers.bench_overhead"
    if (status := relaunched(module, measured_config(args.config), argv)) is not None:
        return status
    rows = measure(args.method, args.config, args.turns)
    print_rows(
        Console(), "random text, the speed of the same engine without speculation is 1", rows
    )
    options = {key: value for key, value in vars(args).items() if key != "config"}
    print(
        json.dumps({"benchmark": "overhead", **circumstances(), "options": options, "rows": rows})
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
