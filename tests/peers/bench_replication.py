"""Lag between replicas, and saturation of the store of the cluster's memory.

    python -m tests.peers replication [--seconds 15]

It starts a Ray cluster on this machine. Each replica decodes 32 requests. Their tokens are random,
since their values do not affect the cost. The lag of a record is the age of its first token when
another replica has it. That is the wait for more of the same text, and two calls of the store. Each
measurement has a new store.

Saturation: one caller has 8 calls in flight, so the store or the caller is always busy. The store's
share of a CPU shows which. ``read`` returns the same 256 KiB again and again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from specserve.compare.machine import circumstances
from tests.integration.cluster import Cluster, running_cluster
from tests.peers.replication_host import Task

LOADS = ((2, 1, 50_000), (2, 1, 400_000), (2, 4, 50_000), (2, 8, 50_000))
"""Processes, replicas in each, tokens per second of all replicas together."""

RECORD_TOKENS = (128, 16, 0)
"""Tokens of the records that saturate the store; 0: reading."""


def run_hosts(cluster: Cluster, tasks: Sequence[Task]) -> tuple[list[dict[str, Any]], float]:
    """(the hosts' results, the store's share of a CPU)."""
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.peers.replication_host", json.dumps(asdict(task))],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=cluster.environment,
            text=True,
        )
        for task in tasks
    ]
    try:
        for host in hosts:
            _answer(host, "ready")
        store = max(cluster.processes("TrieStore"), key=lambda process: process.create_time())
        before = store.cpu_times()
        for host in hosts:
            assert host.stdin is not None
            host.stdin.write("\n")
            host.stdin.flush()
        found = [json.loads(_answer(host, "{")) for host in hosts]
        after = store.cpu_times()
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    cpu = after.user + after.system - before.user - before.system
    return found, cpu / tasks[0].seconds


def _answer(host: subprocess.Popen[str], beginning: str) -> str:
    """The next line that begins with ``beginning``. Ray prints to standard output too."""
    assert host.stdout is not None
    for line in host.stdout:
        if line.startswith(beginning):
            return line
    raise RuntimeError(f"a host ended with {host.wait()}")


def measure_lag(cluster: Cluster, seconds: float) -> list[dict[str, Any]]:
    """One row for each of ``LOADS``."""
    rows = []
    for num_hosts, num_replicas, tokens_per_s in LOADS:
        base = Task(
            address=cluster.address,
            fingerprint=f"lag-{num_hosts * num_replicas}-{tokens_per_s}",
            num_replicas=num_replicas,
            tokens_per_s=tokens_per_s / num_hosts,
            seconds=seconds,
        )
        found, cpu = run_hosts(
            cluster, [Task(**{**asdict(base), "seed": seed}) for seed in range(num_hosts)]
        )
        lags_s = np.concatenate([each["lags_s"] for each in found])
        written = sum(each["written_tokens"] for each in found)
        rows.append(
            {
                "replicas": num_hosts * num_replicas,
                "tokens_per_s": written / seconds,
                **{f"lag_p{q}_s": float(np.percentile(lags_s, q)) for q in (50, 99, 100)},
                "share_received": sum(each["received_tokens"] for each in found)
                / max(written * (num_hosts * num_replicas - 1), 1),
                "publish_us": max(each["publish_us"] for each in found),
                "dropped_tokens": sum(each["dropped_tokens"] for each in found),
                "store_cpu": cpu,
                "replica_cpu": sum(each["cpu"] for each in found) / num_hosts / num_replicas,
            }
        )
    return rows


def measure_saturation(cluster: Cluster, seconds: float) -> list[dict[str, Any]]:
    """One row for each of ``RECORD_TOKENS``."""
    rows = []
    for record_tokens in RECORD_TOKENS:
        task = Task(
            address=cluster.address,
            fingerprint=f"busy-{record_tokens}",
            record_tokens=record_tokens,
            seconds=seconds,
        )
        (found,), cpu = run_hosts(cluster, [task])
        rows.append(
            {
                "store": f"{record_tokens} tokens a record" if record_tokens else "read",
                "tokens_per_s": found["tokens_per_s"],
                "calls_per_s": found["calls_per_s"],
                "store_cpu": cpu,
            }
        )
    return rows


def show(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints rows with equal keys as a table."""
    table = Table(title=title, box=None, title_justify="left", padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(name.replace("_", "\n"), justify="right")
    for row in rows:
        table.add_row(*map(_text, row.values()))
    console.print(table)


def _text(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.2f}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


def main(options: Sequence[str]) -> None:
    """Measures, prints the tables and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers replication")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each row (default: 15)")
    parser.add_argument("--config", help=argparse.SUPPRESS)
    args = parser.parse_args(options)
    before = circumstances()
    with running_cluster(1) as cluster:
        lag = measure_lag(cluster, args.seconds)
        saturation = measure_saturation(cluster, args.seconds)
    console = Console()
    show(console, "Replication", lag)
    show(console, "The store, saturated", saturation)
    result = {"benchmark": "replication", **before, "lag": lag, "saturation": saturation}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
