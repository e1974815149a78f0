"""One engine: all sources together, beside each of them alone and no speculation.

    python -m tests.peers arbiter [--rounds 2] [--extra-layers 12]

As ``engine``, at concurrency 1, 8 and 32. To hold: all together at least as fast as the best alone,
and never slower than no speculation. The built-in sets have 16 prompts, so that at concurrency 32
each is asked twice at once, and what the trie learned at one concurrency it knows at the next.

``--extra-layers`` gives the target so many more layers that change nothing (inflate.py): the same
text at the price of a larger model, so that the cost of drafting is as small beside it as where
real models are served.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specserve.bench.machine import circumstances
from specserve.bench.prompts import BUILT_IN, load_prompts, load_tokenizer
from specserve.core.config import AppConfig
from specserve.engine.generation import Job, Sampling
from tests.peers.bench_engine import Contender, compare, measured_config
from tests.peers.bench_memory import again_jobs, asked_again
from tests.peers.inflate import inflate
from tests.peers.tables import print_rows

CONCURRENCIES = (1, 8, 32)
ALL = "all"


def contenders(config: AppConfig) -> list[Contender]:
    """None, each configured source alone, and all."""
    kinds = [source.kind for source in config.speculation]
    return [Contender(name, name, config) for name in ("none", *kinds, ALL)]


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each set and concurrency: the best single source, and all sources compared to it."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["set"], row["concurrency"]), {})[row["method"]] = row["ratio"]
    answers = []
    for (name, concurrency), ratios in found.items():
        together = ratios.pop(ALL)
        best = max(ratios, key=lambda method: ratios[method])
        answers.append(
            {
                "set": name,
                "concurrency": concurrency,
                "best": best,
                "best_ratio": ratios[best],
                "all_ratio": together,
                "all_over_best": round(together / ratios[best], 3),
            }
        )
    return answers


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table a concurrency, the verdicts and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--extra-layers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = measured_config(args.config)
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.revision)
    files = asked_again(args.seed)
    sampling, most = Sampling(max_tokens=args.max_tokens), max(CONCURRENCIES)
    rounds = []
    for seed in range(args.seed, args.seed + args.rounds):
        sets = {
            name: [
                Job(each.token_ids, sampling) for each in load_prompts(name, tokenizer, seed=seed)
            ]
            for name in BUILT_IN
        }
        jobs = {name: (of_set * most)[:most] for name, of_set in sets.items()}
        jobs["again"] = again_jobs(tokenizer, files, most, args.max_tokens, seed)
        rounds.append(jobs)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        if args.extra_layers:
            target = Path(folder, "target")
            inflate(Path(config.model.path), target, args.extra_layers)
            model = config.model.model_copy(update={"path": str(target)})
            config = config.model_copy(update={"model": model})
        rows = compare(console, contenders(config), rounds, CONCURRENCIES)
    answers = verdicts(rows)
    print_rows(console, "all sources together, and the best alone", answers)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "rows": rows}
    print(json.dumps({"benchmark": "arbiter", **circumstances(), **document, "verdicts": answers}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
