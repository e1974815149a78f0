"""Streaming speed of ``/generate_stream`` and ``/v1/completions``: one server, routes in turns.

    python -m tests.peers generation [--clients 8] [--turns 6] [--number 32]

Both get the same greedy requests. A stream of the first has an event for each token, with its text
and log-probability. A stream of the second has an event for each step. ``completions+logprobs``
asks the second for log-probabilities too. The first turn is not counted, because the draft memory
has all texts only after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from rich.console import Console

from specserve.compare.machine import circumstances
from specserve.compare.prompts import configured_tokenizer
from specserve.core.errors import SpecServeError
from tests.peers.bench_engine import measured_config
from tests.peers.servers import serve
from tests.peers.tables import print_rows
from tests.peers.workload import Request, Workload

ROUTES = ("completions", "completions+logprobs", "generate_stream")


def body(request: Request, route: str, model: str) -> dict[str, Any]:
    """Body of one greedy request for a route."""
    if route == "generate_stream":
        parameters = {"max_new_tokens": request.max_tokens, "details": True}
        return {"inputs": request.prompt, "parameters": parameters}
    asked = {**request.body(model), "ignore_eos": False}
    return {**asked, "logprobs": 0} if route == "completions+logprobs" else asked


def num_tokens(route: str, stream: bytes) -> int:
    """Number of generated tokens of a whole stream."""
    events = [line.removeprefix(b"data:") for line in stream.splitlines() if line]
    if route == "generate_stream":
        number: int = json.loads(events[-1])["details"]["generated_tokens"]
        return number
    return int(json.loads(events[-2])["usage"]["completion_tokens"])


async def drive(
    url: str, model: str, requests: Sequence[Request], route: str, num_clients: int
) -> float:
    """Output tokens per second of all requests, ``num_clients`` at a time."""
    path = "/generate_stream" if route == "generate_stream" else "/v1/completions"
    left, streams = iter(requests), list[bytes]()

    async def client(http: aiohttp.ClientSession) -> None:
        for request in left:
            async with http.post(f"{url}{path}", json=body(request, route, model)) as answer:
                streams.append(await answer.read())
                if answer.status != 200:
                    raise SpecServeError(f"{path} answers {answer.status}: {streams[-1][:200]!r}")

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as http:
        began = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(num_clients)))
        seconds = time.perf_counter() - began
    return sum(num_tokens(route, each) for each in streams) / seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--number", type=int, default=32, help="requests of a turn")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = measured_config(args.config)
    tokenizer = configured_tokenizer(config)
    requests = Workload(tokenizer, args.seed).load("plain-code", args.clients, args.number).measured
    speeds: dict[str, list[float]] = {route: [] for route in ROUTES}
    with serve("specserve", config) as url:
        order = list(ROUTES)
        for turn in range(args.turns + 1):
            for route in order:
                speed = asyncio.run(drive(url, config.model.name, requests, route, args.clients))
                speeds[route] += [speed] if turn else []
            order = order[1:] + order[:1]
    rows = []
    for route, found in speeds.items():
        ratios = [x / y for x, y in zip(found, speeds["completions"], strict=True)]
        rows.append(
            {
                "route": route,
                "tokens_per_second": round(median(found), 1),
                "x_completions": round(median(ratios), 3),
                "turns": [round(each, 1) for each in found],
            }
        )
    print_rows(Console(width=100), f"streams of {args.clients} clients", rows)
    options = {key: value for key, value in vars(args).items() if key != "config"}
    print(
        json.dumps({"benchmark": "generation", **circumstances(), "options": options, "rows": rows})
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
