"""Over HTTP: specserve's ``serve run`` compared with the methods of ``vllm serve``.

    python -m tests.peers server [--traffic never-seen,agent] [--clients 1 8] [--turns 3]
        [--servers specserve,vllm-plain,vllm-ngram@ours] [--extra-layers 12] [--ignore-eos]

All servers have the same engine options. ``specserve-none`` has ``speculation: []``, and
``specserve-ngram+trie`` only these two of the configured sources.
``@ours`` is ``vllm serve`` with our CPU kernels. ``vllm-mtp:2`` drafts two tokens.

Traffic (see workload.py): {traffic}.

All servers run from the beginning and take turns of some seconds, as a machine's speed changes
within minutes. In a turn all get the same requests; each turn has new ones. Warm-up requests are
not counted. Ratios are taken within a turn, to the best ``vllm serve`` of that turn and to the
better ``plain`` one. Tables have the median over the turns.

A server of the demo model takes up to 3.6 GiB. Ray ends its processes when 95 % of the machine's
memory is used. An idle Ray cluster uses a seventh of a CPU. Without ``--servers``, ``random`` and
``plain-code`` go only to the servers that show the cost of drafting and serving.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress

from specserve.compare.machine import circumstances
from specserve.compare.prompts import configured_tokenizer
from specserve.core.config import AppConfig
from specserve.core.errors import SpecServeError
from specserve.serve.config_file import read
from tests.peers.inflate import inflated
from tests.peers.load_client import drive
from tests.peers.servers import OURS, check, serve
from tests.peers.tables import print_rows
from tests.peers.workload import TRAFFIC, Load, Workload, known_traffic

NUM_REQUESTS = {1: 12, 8: 48, 24: 96}
"""Requests of a turn, by number of clients."""

PLAIN = ("vllm-plain", "vllm-plain@ours")
SERVERS = (*OURS, "vllm-plain@ours", "vllm-ngram@ours", "vllm-suffix@ours")
"""Default servers, which fit into 24 GiB. Each of vLLM's methods is faster on our kernels."""
ASKED_BY_DEFAULT = {
    "plain-code": ("specserve-none", "vllm-plain@ours"),
    "random": (*OURS, "vllm-plain@ours"),
}
"""Servers by traffic. Other traffic goes to all servers except ``specserve-none``."""

Place = tuple[str, int]
"""Traffic and number of clients."""


def measure(
    console: Console,
    config: AppConfig,
    servers: Mapping[str, Sequence[Place]],
    turns: Sequence[Mapping[Place, Load]],
) -> list[dict[str, Any]]:
    """Runs every server in each turn. Prints and returns a row for each place and server.

    Args:
        console: console for progress and results.
        config: the served application.
        servers: places of each server.
        turns: load of each place, for each turn.

    Raises:
        SpecServeError: a request failed; the message names the server.
    """
    rows = []
    with Progress(console=console) as bars, ExitStack() as started:
        bar = bars.add_task("starting", total=len(turns) * sum(map(len, servers.values())))
        urls = {name: started.enter_context(serve(name, config)) for name in servers}
        for place in turns[0]:
            bars.update(bar, description=f"{place[0]}, {place[1]} clients")
            asked = [name for name, places in servers.items() if place in places]
            found: dict[str, list[dict[str, float]]] = {name: [] for name in asked}
            for number, loads in enumerate(turns):
                for name in _turned(asked, number):
                    ask = partial(drive, urls[name], config.model.name)
                    try:
                        ask(loads[place].warm_up, place[1])
                        found[name].append(ask(loads[place].measured, place[1]))
                    except (SpecServeError, aiohttp.ClientError) as error:
                        raise SpecServeError(f"{name} with {place}: {error!r}") from error
                    bars.advance(bar)
            of_place = summarise(place, found)
            print_rows(console, _title(place), of_place)
            rows += of_place
    return rows


def _title(place: Place) -> str:
    return f"{place[0]}, {place[1]} clients; ratios to the best of vllm serve, and to its plain one"


def _turned(names: Sequence[str], number: int) -> list[str]:
    """The names, starting with another one in each turn, reversed in every other turn."""
    first = number // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if number % 2 else order


def summarise(place: Place, found: Mapping[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A row for each server from its results by turn."""
    traffic, num_clients = place
    by_turn = _by_turn(found)
    best = [_best(each, "vllm-") for each in by_turn]
    plain = [_best(each, "vllm-plain") for each in by_turn]
    first = [_first(each) for each in by_turn]
    rows = []
    for server, results in found.items():
        speeds = [result["tokens_per_second"] for result in results]
        firsts = [result["first_token_ms"] for result in results]
        rows.append(
            {
                "traffic": traffic,
                "clients": num_clients,
                "server": server,
                "tokens_per_second": round(median(speeds), 1),
                "x_best_vllm": _ratio(speeds, best),
                "x_plain": _ratio(speeds, plain),
                "first_token_ms": round(median(firsts), 1),
                "first_x_plain": _ratio(firsts, first),
                "token_ms": round(median(result["token_ms"] for result in results), 2),
                "each_x_best_vllm": _ratios(speeds, best),
                "each_x_plain": _ratios(speeds, plain),
                "turns": results,
            }
        )
    return rows


def _by_turn(
    of_place: Mapping[str, Sequence[dict[str, float]]],
) -> list[dict[str, dict[str, float]]]:
    turns = zip(*of_place.values(), strict=True)
    return [dict(zip(of_place, each, strict=True)) for each in turns]


def _best(results: Mapping[str, dict[str, float]], prefix: str) -> float:
    """Highest speed of the servers whose names begin with ``prefix``; 0 without any."""
    speeds = [one["tokens_per_second"] for name, one in results.items() if name.startswith(prefix)]
    return max(speeds, default=0.0)


def _first(results: Mapping[str, dict[str, float]]) -> float:
    """Shortest median time to the first token of the plain servers; 0 without any."""
    return min((results[name]["first_token_ms"] for name in PLAIN if name in results), default=0.0)


def _ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [round(a / b, 3) for a, b in zip(values, others, strict=True) if b]


def _ratio(values: Sequence[float], others: Sequence[float]) -> float | str:
    """Median ratio; empty without values to compare with."""
    return round(median(ratios), 3) if (ratios := _ratios(values, others)) else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    listing = "; ".join(f"``{name}``: {what}" for name, what in TRAFFIC.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").format(traffic=listing),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--servers", help=f"default: {','.join(SERVERS)}")
    parser.add_argument("--traffic", default=",".join(TRAFFIC))
    parser.add_argument("--clients", type=int, nargs="+", default=list(NUM_REQUESTS))
    parser.add_argument(
        "--num-requests", type=int, default=0, help="requests of a turn (default: 6, 24 and 48)"
    )
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--extra-layers", type=int, default=0)
    parser.add_argument("--ignore-eos", action="store_true", help="equally long answers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    kinds = known_traffic(parser, args.traffic)
    places = [(kind, number) for kind in kinds for number in args.clients]
    servers = _places_by_server(args.servers, places)
    console = Console(width=160)
    config = read(args.config).applications[0].config
    tokenizer = configured_tokenizer(config)
    workload = Workload(tokenizer, args.seed, ignore_eos=args.ignore_eos)
    turns = [
        {
            place: workload.load(
                *place, args.num_requests or NUM_REQUESTS.get(place[1], 3 * place[1])
            )
            for place in places
        }
        for _ in range(args.turns)
    ]
    with tempfile.TemporaryDirectory(prefix="specserve-bench-") as folder:
        config = inflated(config, args.extra_layers, Path(folder, "target"))
        rows = measure(console, config, servers, turns)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    document = {"options": options, "config": config.model_dump(mode="json"), "rows": rows}
    print(json.dumps({"benchmark": "server", **circumstances(), **document}))
    return 0


def _places_by_server(names: str | None, places: Sequence[Place]) -> dict[str, list[Place]]:
    """Places of each server."""
    if names is not None:
        return {check(name): list(places) for name in names.split(",")}
    everywhere = [name for name in SERVERS if name != "specserve-none"]
    asked = {
        check(name): [p for p in places if name in ASKED_BY_DEFAULT.get(p[0], everywhere)]
        for name in SERVERS
    }
    return {name: of_server for name, of_server in asked.items() if of_server}


if __name__ == "__main__":
    raise SystemExit(main())
