"""One engine whose sources are switched in each turn: none, each alone, all.

    python -m tests.peers switched [--turns 6] [--sets chat,again] [--states trie,all]
        [--concurrencies 1 8] [--extra-layers 12]

All states run in one process, since two equal engines differ by some percent, as much as the effect
to measure. In a turn, all states have the same jobs. A source learns in the turns in which it is
asked, and drafters get texts only in their turns. The first turn of each state is not counted.
Neither are the jobs that a state serves first, as many as run at once: the policy has just learned
from another state. At 8 and 32 a turn has three times as many requests as run at once. Otherwise a
draining batch would shrink earlier with accepted drafts. Before each state of ``mixed``, the tries
are cleared, and the jobs served first are the tasks of ``again``: the tries know no other job.

Sets: jobs.py. The built-in sets except ``code`` have 16 prompts, so the trie knows them from
earlier turns. ``mixed`` has requests for each source in a batch. ``random`` with
``--states none,all`` measures the cost of drafting where nothing can be predicted. The source
``prediction`` has drafts in ``predicted`` and ``mixed``, ``grammar`` in ``structured`` and
``mixed``.

``--extra-layers`` adds this many layers to the target that do not change its output (inflate.py).
It gives the same text at the cost of a larger model. So the cost of drafting is relatively small,
as with real models.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from rich.console import Console
from rich.progress import track

from specserve.compare.machine import circumstances
from specserve.compare.prompts import configured_tokenizer
from specserve.core.config import AppConfig
from tests.peers.bench_engine import measured_config
from tests.peers.in_process import (
    SourcesSwitch,
    SpeculationSwitch,
    relaunched,
    scheduler_of,
    worker_of,
)
from tests.peers.inflate import inflated
from tests.peers.jobs import MIXED, SETS, JobSets
from tests.peers.tables import print_rows

CONCURRENCIES = (1, 8, 32)
MIN_JOBS, WAVES = 10, 3
NONE, ALL = "none", "all"

# Modules that load vLLM are imported where they are used, after the environment is set.


class Sources:
    """Switches an engine's sources.

    Args:
        engine: an :class:`~specserve.engine.offline.OfflineEngine` of one shard.
        kinds: kinds of its sources.
    """

    def __init__(self, engine: Any, kinds: Sequence[str]) -> None:
        worker = worker_of(engine)
        self._kinds = kinds
        self._scheduler, self._step = scheduler_of(engine), engine._engine.step
        self._hook = worker.model_runner.drafter
        self._ask = SourcesSwitch(self._hook._chain)
        self._speculate = SpeculationSwitch(worker)
        self._has_drafters = self._hook._feeds_drafters
        members = [each.member for each in self._hook._chain._sources]
        self._memories = [each.source._memory for each in members if each.kind == "trie"]

    def clear_tries(self) -> None:
        """Removes all texts from the tries. No request may be running."""
        for memory in self._memories:
            for trie in memory.tries().values():
                trie.clear()

    def switch(self, state: str) -> None:
        """Switches from the next step on. No request may be running."""
        while self._scheduler.has_finished_requests():
            self._step()  # an empty step tells the sources
        asked = {kind for kind in self._kinds if state in (ALL, kind)}
        self._ask(asked)
        has_drafters = not asked.isdisjoint(("mtp", "draft_model"))
        self._hook._feeds_drafters = self._has_drafters and has_drafters
        self._speculate(is_on=state != NONE)


def measure(
    config: AppConfig,
    jobs: JobSets,
    sets: Sequence[str],
    concurrencies: Sequence[int],
    states: Sequence[str],
    num_turns: int,
) -> Iterator[dict[tuple[str, int, str], list[float]]]:
    """Yields, for each set, output tokens per second of each turn by set, concurrency and state."""
    from specserve.engine.methods import parse_method
    from specserve.engine.offline import OfflineEngine

    engine = OfflineEngine(config, parse_method(ALL, config))
    sources = Sources(engine, [source.kind for source in config.speculation])
    for name in sets:
        for concurrency in concurrencies:
            speeds: dict[tuple[str, int, str], list[float]] = {}
            number = MIN_JOBS if concurrency == 1 else WAVES * concurrency
            order = list(states)
            for turn in track(range(num_turns + 1), f"{name}, concurrency {concurrency}"):
                few = jobs.jobs(name, number)
                for state in order:
                    sources.switch(state)
                    first = few[:concurrency]
                    if name == "mixed":
                        sources.clear_tries()
                        first = few[MIXED.index("again") :: len(MIXED)]
                    engine.run(first, concurrency, lambda *_: None)
                    run = engine.run(few, concurrency, lambda *_: None)
                    if turn:
                        key = name, concurrency, state
                        speeds.setdefault(key, []).append(run.tokens_per_second)
                order = order[1:] + order[:1]
            yield speeds
    engine.close()


def summarise(speeds: dict[tuple[str, int, str], list[float]]) -> list[dict[str, Any]]:
    """For each set and concurrency: all sources over the best single one, and each over none.

    The best source has the highest median speed. Noise favours it a little.
    """
    rows = []
    for name, concurrency in dict.fromkeys(key[:2] for key in speeds):
        of = {key[2]: found for key, found in speeds.items() if key[:2] == (name, concurrency)}
        row: dict[str, Any] = {"set": name, "concurrency": concurrency}
        if single := _single(of):
            best = max(single, key=lambda state: median(of[state]))
            each_over_best = _ratios(of[ALL], of[best])
            row |= {
                "best": best,
                "best_tokens_per_second": round(median(of[best])),
                "all_over_best": round(median(each_over_best), 3),
                "geometric_mean": round(_geometric_mean(each_over_best), 3),
                "relative_error": round(_error_of_mean(each_over_best), 3),
                "each_over_best": [round(ratio, 3) for ratio in each_over_best],
            }
        if NONE in of:
            row["none_tokens_per_second"] = round(median(of[NONE]))
            for state in [state for state in of if state != NONE]:
                over_none = _ratios(of[state], of[NONE])
                row[f"{state}_over_none"] = round(median(over_none), 3)
            row["each_over_none"] = [round(ratio, 3) for ratio in _ratios(of[ALL], of[NONE])]
        rows.append(row)
    return rows


def _single(states: Iterable[str]) -> list[str]:
    return [state for state in states if state not in (ALL, NONE)]


def _ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(speeds, others, strict=True)]


def _geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(fmean(map(math.log, ratios)))


def _error_of_mean(ratios: Sequence[float]) -> float:
    """Relative standard error of the geometric mean of two or more ratios."""
    return stdev(map(math.log, ratios)) / math.sqrt(len(ratios))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--extra-layers", type=int, default=0)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--sets", help="prompt sets (default: all)")
    parser.add_argument(
        "--concurrencies", type=int, nargs="+", choices=CONCURRENCIES, default=CONCURRENCIES
    )
    parser.add_argument("--states", help="all, and the states to compare (default: every state)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    names = _known(parser, "--sets", args.sets, SETS)
    config = measured_config(args.config)
    kinds = (source.kind for source in config.speculation)
    states = _known(parser, "--states", args.states, (NONE, *kinds, ALL))
    if ALL not in states or len(states) < 2:
        parser.error(f"--states {args.states}: {ALL} and one more are needed")
    if args.turns < 2:
        parser.error(f"--turns {args.turns}: at least 2")
    if (status := relaunched("tests.peers.bench_switched", config, argv)) is not None:
        return status
    tokenizer = configured_tokenizer(config)
    jobs = JobSets(tokenizer, args.max_tokens, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        config = inflated(config, args.extra_layers, Path(folder, "target"))
        rows = []
        for speeds in measure(config, jobs, names, args.concurrencies, states, args.turns):
            of_place = summarise(speeds)
            print_rows(Console(width=160), "one engine, its sources switched by turns", of_place)
            rows += of_place
    options = {key: value for key, value in vars(args).items() if key != "config"}
    options |= {"sets": names, "states": states}
    print(
        json.dumps({"benchmark": "switched", **circumstances(), "options": options, "rows": rows})
    )
    return 0


def _known(
    parser: argparse.ArgumentParser, option: str, given: str | None, known: Sequence[str]
) -> Sequence[str]:
    """The names in an option's value. None: all names."""
    names = known if given is None else given.split(",")
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) < len(names):
        what = f"{', '.join(unknown)} unknown" if unknown else "each once"
        parser.error(f"{option} {given}: {what}; known are {', '.join(known)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
