"""One engine: all sources together, beside each of them alone and no speculation.

    python -m tests.peers arbiter [--restarts 5] [--extra-layers 12]

As ``engine``, at concurrency 1, 8 and 32. To hold: all together at least as fast as the best alone,
and never slower than no speculation. At 8 and 32 a turn has three times as many requests as run at
once: where drafts are accepted, a batch that only drains becomes small earlier than without.
Answers have half to one and a half times ``--max-tokens``: of answers of one length, an engine
without drafts reads all prompts in the same few steps, as no server can. The built-in sets but
``code`` have 16 prompts, so that a turn at 32 asks each six times, and what the trie learned at one
concurrency it knows at the next.

Two engines that are the same differ by some percent for as long as they live, so all are started
anew several times, each time in another order and with other prompts. And the best of several that
were measured is in part the luckiest: which one all sources are compared to in one start, the
other starts say.

``--extra-layers`` gives the target so many more layers that change nothing (inflate.py): the same
text at the price of a larger model, so that the cost of drafting is as small beside it as where
real models are served.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from specserve.compare.machine import circumstances
from specserve.compare.prompts import BUILT_IN, load_prompts, load_tokenizer
from specserve.core.config import AppConfig
from specserve.engine.generation import Job, RunResult, Sampling
from tests.peers.bench_engine import Contender, Key, measure, measured_config, report
from tests.peers.bench_memory import again_jobs, asked_again
from tests.peers.inflate import inflate
from tests.peers.tables import print_rows

CONCURRENCIES = (1, 8, 32)
LEAST_JOBS, WAVES = 8, 3
NONE, ALL = "none", "all"

Start = Mapping[Key, Sequence[RunResult]]
"""What was measured between two starts of the engines."""


def contenders(config: AppConfig) -> list[Contender]:
    """None, each configured source alone, and all."""
    kinds = [source.kind for source in config.speculation]
    return [Contender(name, name, config) for name in (NONE, *kinds, ALL)]


def inflated(config: AppConfig, num_layers: int, folder: Path) -> AppConfig:
    """The configuration with so many more layers in the target, which is written to ``folder``."""
    if not num_layers:
        return config
    inflate(Path(config.model.path), folder, num_layers)
    model = config.model.model_copy(update={"path": str(folder)})
    return config.model_copy(update={"model": model})


def jobs_of_sets(
    config: AppConfig, max_tokens: int, seed_of_files: int, seed: int
) -> dict[str, list[Job]]:
    """Enough jobs for a turn at the highest concurrency, of each built-in set and ``again``."""
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.revision)
    sampling, most = Sampling(max_tokens=max_tokens), WAVES * max(CONCURRENCIES)
    jobs = {}
    for name in BUILT_IN:
        num_prompts = most if name == "code" else 0
        of_set = load_prompts(name, tokenizer, num_prompts=num_prompts, seed=seed)
        jobs[name] = [Job(each.token_ids, sampling) for each in (of_set * most)[:most]]
    jobs["again"] = again_jobs(tokenizer, asked_again(seed_of_files), most, max_tokens, seed)
    return {name: of_many_lengths(of_set, seed) for name, of_set in jobs.items()}


def of_many_lengths(jobs: Sequence[Job], seed: int) -> list[Job]:
    """The jobs with half to one and a half times as many output tokens each."""
    rng = random.Random(seed)
    varied = []
    for job in jobs:
        most = job.sampling.max_tokens
        sampling = replace(
            job.sampling, max_tokens=rng.randint(max(most // 2, 1), most + most // 2)
        )
        varied.append(replace(job, sampling=sampling))
    return varied


def verdicts(starts: Sequence[Start]) -> list[dict[str, Any]]:
    """For each set and concurrency: all sources over the best single one, and over none.

    Args:
        starts: at least two.
    """
    answers = []
    for name, concurrency in dict.fromkeys(key[:2] for key in starts[0]):
        at = [
            {
                method: runs
                for (*place, method), runs in start.items()
                if place == [name, concurrency]
            }
            for start in starts
        ]
        over_best = [
            median(over(start, ALL, best([*at[:number], *at[number + 1 :]])))
            for number, start in enumerate(at)
        ]
        over_none = [median(over(start, ALL, NONE)) for start in at]
        answers.append(
            {
                "set": name,
                "concurrency": concurrency,
                "best": best(at),
                "all_over_best": round(median(over_best), 3),
                "all_over_none": round(median(over_none), 3),
                "each_over_best": [round(ratio, 3) for ratio in over_best],
                "each_over_none": [round(ratio, 3) for ratio in over_none],
            }
        )
    return answers


OnePlace = Mapping[str, Sequence[RunResult]]
"""The turns of each method in one start, of one set at one concurrency."""


def best(starts: Sequence[OnePlace]) -> str:
    """The fastest of what is no combination."""
    speed = {
        method: median(ratio for start in starts for ratio in over(start, method, NONE))
        for method in starts[0]
        if method != ALL
    }
    return max(speed, key=lambda method: speed[method])


def over(start: OnePlace, method: str, other: str) -> list[float]:
    """One method's output tokens a second over another's, turn by turn."""
    pairs = zip(start[method], start[other], strict=True)
    return [one.tokens_per_second / two.tokens_per_second for one, two in pairs]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table a concurrency, the verdicts and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--extra-layers", type=int, default=0)
    parser.add_argument("--restarts", type=int, default=5, help="of all engines; at least 2")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.restarts < 2:
        parser.error(f"--restarts {args.restarts}: at least 2, one is judged by the others")
    config = measured_config(args.config)
    seeds = range(args.seed, args.seed + args.restarts)
    rounds = [jobs_of_sets(config, args.max_tokens, args.seed, seed) for seed in seeds]
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        config = inflated(config, args.extra_layers, Path(folder, "target"))
        entrants = order = contenders(config)
        starts = []
        for jobs in rounds:
            starts.append(measure(console, order, [jobs], CONCURRENCIES, LEAST_JOBS, WAVES))
            order = order[1:] + order[:1]
    together: dict[Key, list[RunResult]] = defaultdict(list)
    for start in starts:
        for key, runs in start.items():
            together[key] += runs
    rows = report(console, entrants, together)
    answers = verdicts(starts)
    print_rows(console, "all sources together, and the best alone", answers)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "rows": rows}
    print(json.dumps({"benchmark": "arbiter", **circumstances(), **document, "verdicts": answers}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
