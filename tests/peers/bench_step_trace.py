"""A timeline of single steps over all processes of the server, as a file for Perfetto.

    python -m tests.peers step-trace [--traffic never-seen] [--clients 8] [--steps 3]
        [--out step-trace.json]

It streams answers to some clients, and records steps from the middle: receiving the request,
scheduling, the executor's hand-over, the worker, sampling, drafting, sending the tokens. Open the
file at https://ui.perfetto.dev or in chrome://tracing. The table has the times of these spans per
step. Tracing costs some microseconds per span. Traffic is that of ``server``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from specserve.compare.machine import circumstances
from specserve.compare.prompts import configured_tokenizer
from specserve.core.config import AppConfig
from specserve.core.errors import SpecServeError
from specserve.serve.config_file import read
from tests.integration.cluster import HAPROXY, Cluster, serving
from tests.peers.load_client import drive
from tests.peers.spans import SUFFIX
from tests.peers.tables import print_rows
from tests.peers.workload import TRAFFIC, Request, Workload

REQUESTS_OF_CLIENT = 4
STEP = "step"


@dataclass(frozen=True, order=True)
class Span:
    """A span of work in a thread, in nanoseconds of the machine's monotonic clock."""

    started: int
    ended: int
    name: str
    thread: str
    process: str


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file. Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--plain", action="store_true", help="with `speculation: []`")
    parser.add_argument("--traffic", default="never-seen", choices=TRAFFIC)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("step-trace.json"))
    args = parser.parse_args(argv)
    config = read(args.config).applications[0].config
    if args.plain:
        config = config.model_copy(update={"speculation": ()})
    workload = Workload(configured_tokenizer(config), seed=0, ignore_eos=True)
    load = workload.load(args.traffic, args.clients, REQUESTS_OF_CLIENT * args.clients)
    spans = record(config, load.measured, args.clients)
    args.out.write_text(json.dumps(timeline(cut(spans, args.steps))))
    rows = list(summarise(spans))
    print_rows(Console(), f"{args.clients} clients, all steps; the timeline is in {args.out}", rows)
    options = {key: str(value) for key, value in vars(args).items()}
    print(
        json.dumps({"benchmark": "step-trace", **circumstances(), "options": options, "rows": rows})
    )
    return 0


def record(config: AppConfig, requests: Sequence[Request], num_clients: int) -> list[Span]:
    """Spans of all processes of a server while it answered, in order of time."""
    cluster = Cluster([os.cpu_count() or 1])
    cluster.use_compiler()
    if HAPROXY.exists():
        cluster.use_haproxy()
    try:
        cluster.start()
        application = {"/": config.model_dump(mode="json")}
        with serving(cluster, application, "tests.peers.traced:build") as deployment:
            drive(deployment.base_url(), config.model.name, requests, num_clients)
            return sorted(_read(cluster))
    finally:
        cluster.stop()


def _read(cluster: Cluster) -> Iterator[Span]:
    kinds = {process.pid: "replica" for process in cluster.replicas()}
    kinds |= {process.pid: "engine core" for process in cluster.engine_cores()}
    kinds |= {process.pid: "shard" for process in cluster.shards()}
    for path in cluster.folder.glob(f"*{SUFFIX}"):
        pid = int(path.stem)
        for line in path.read_text().splitlines():
            name, thread, started, ended = json.loads(line)
            yield Span(started, ended, name, thread, f"{kinds.get(pid, 'process')} {pid}")


def cut(spans: Sequence[Span], num_steps: int) -> list[Span]:
    """The spans that began within some steps in the middle."""
    steps = [span for span in spans if span.name == STEP]
    if len(steps) < num_steps:
        raise SpecServeError(f"{len(steps)} steps were recorded, --steps asks for {num_steps}")
    first = (len(steps) - num_steps) // 2
    began, ended = steps[first].started, steps[first + num_steps - 1].ended
    tail = (ended - began) // num_steps  # the last tokens are sent in this time
    return [span for span in spans if began <= span.started <= ended + tail]


def timeline(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans in the trace event format, with a row for each thread. Times in microseconds."""
    processes = sorted({span.process for span in spans})
    threads = sorted({(span.process, span.thread) for span in spans})
    start = min(span.started for span in spans)
    names = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": process}}
        for number, process in enumerate(processes)
    ]
    names += [
        {
            **{"ph": "M", "name": "thread_name", "pid": processes.index(process)},
            **{"tid": number, "args": {"name": thread}},
        }
        for number, (process, thread) in enumerate(threads)
    ]
    events = [
        {
            **{"ph": "X", "name": span.name, "pid": processes.index(span.process)},
            **{"tid": threads.index((span.process, span.thread))},
            **{"ts": (span.started - start) / 1e3, "dur": (span.ended - span.started) / 1e3},
        }
        for span in spans
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def summarise(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """A row for each kind of span: its duration, and its time per step."""
    num_steps = sum(span.name == STEP for span in spans)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in spans:
        times[span.process.split(" ")[0], span.name].append((span.ended - span.started) / 1e6)
    for (process, name), found in sorted(times.items()):
        yield {
            "process": process,
            "span": name,
            "median ms": round(median(found), 3),
            "ms a step": round(sum(found) / max(num_steps, 1), 3),
        }


if __name__ == "__main__":
    raise SystemExit(main())
