"""Two replicas with one shared drafter, compared with two replicas with a drafter each.

    python -m tests.peers sharing [--rounds 8]

Both pairs of engines live in one Ray cluster and take turns. The two engines of a pair run at the
same time with different prompts, and always draft. As in serving, drafters are Ray actors. All use
the same CPUs, so a second drafter adds no computing power. The comparison shows whether sharing one
drafter slows the replicas down.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import ray
from rich.console import Console
from rich.progress import track

from specserve.compare.machine import circumstances
from specserve.compare.prompts import configured_tokenizer, load_prompts
from specserve.core.config import AppConfig
from specserve.core.openmp import openmp_environment
from specserve.core.source_config import MtpConfig
from specserve.engine.generation import Job, RunResult, Sampling
from tests.peers.bench_engine import measured_config
from tests.peers.tables import print_rows

CONCURRENCIES = (1, 8)
PAIRS = {"a drafter each": 2, "one for both": 1}
THREADS = 1
NUM_PROMPTS = 16


class Replica:
    """A replica's engine in a Ray actor."""

    def load(self, config: AppConfig) -> None:
        """Builds the engine, and waits for its drafter."""
        # Imported here, because the actor's environment must be set before vLLM is loaded.
        from specserve.engine.methods import parse_method
        from specserve.engine.offline import OfflineEngine

        self._engine = OfflineEngine(config, parse_method("mtp", config))

    def run(self, jobs: list[Job], concurrency: int) -> RunResult:
        """Runs all jobs."""
        return self._engine.run(jobs, concurrency, lambda num_done, num_tokens: None)


def replicas(config: AppConfig, num_drafters: int) -> list[Any]:
    """Handles of two replicas, with one shared drafter or one each."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment |= openmp_environment(THREADS)
    # Room for texts of both replicas. The pairs differ by one, so they do not share drafters.
    source = MtpConfig(
        kind="mtp", dynamic=False, num_cpus=0, num_actors=num_drafters, max_texts=32 + num_drafters
    )
    config = config.model_copy(update={"speculation": (source,)})
    replica = ray.remote(num_cpus=0, runtime_env={"env_vars": environment})(Replica)
    found = [replica.remote() for _ in range(2)]
    for actor in found:
        ray.get(actor.load.remote(config))
    return found


def measure(
    pairs: dict[str, list[Any]], jobs: Sequence[list[Job]], rounds: int
) -> list[dict[str, Any]]:
    """A row for each concurrency and pair.

    Args:
        pairs: replicas by the name of their pair.
        jobs: jobs of each replica.
        rounds: number of turns of each pair and concurrency.
    """
    results: dict[tuple[int, str], list[list[RunResult]]] = {}
    orders = [list(pairs), list(pairs)[::-1]]
    turns = [(c, name) for c in CONCURRENCIES for i in range(rounds) for name in orders[i % 2]]
    for concurrency, name in track(turns, "measuring"):
        calls = [
            replica.run.remote(of_replica[: max(concurrency, 4)], concurrency)
            for replica, of_replica in zip(pairs[name], jobs, strict=True)
        ]
        results.setdefault((concurrency, name), []).append(ray.get(calls))
    rows = []
    for concurrency in CONCURRENCIES:
        base = rates(results[concurrency, next(iter(pairs))])
        for name in pairs:
            found = rates(results[concurrency, name])
            ratios = [one / other for one, other in zip(found, base, strict=True)]
            rows.append(
                {
                    "concurrency": concurrency,
                    "drafters": name,
                    "tokens_per_second": round(median(found), 1),
                    "ratio": round(median(ratios), 3),
                    "ratios": [round(ratio, 3) for ratio in ratios],
                    "accepted_tokens": sum(
                        draft.num_accepted_tokens
                        for turn in results[concurrency, name]
                        for run in turn
                        for draft in run.drafts
                    ),
                }
            )
    return rows


def rates(turns: Sequence[Sequence[RunResult]]) -> list[float]:
    """Output tokens per second of each replica and turn."""
    return [run.tokens_per_second for turn in turns for run in turn]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/mtp.yaml"))
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = measured_config(args.config)
    tokenizer = configured_tokenizer(config)
    prompts = load_prompts("code", tokenizer, num_prompts=NUM_PROMPTS, seed=args.seed)
    sampling = Sampling(max_tokens=args.max_tokens)
    jobs = [Job(prompt.token_ids, sampling) for prompt in prompts]
    halves = [jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]]
    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        pairs = {name: replicas(config, number) for name, number in PAIRS.items()}
        measure(pairs, halves, 1)  # warms up
        rows = measure(pairs, halves, args.rounds)
    finally:
        ray.shutdown()
    print_rows(Console(), "two replicas, output tokens a second of each", rows)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "rows": rows}
    print(json.dumps({"benchmark": "sharing", **circumstances(), **document}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
