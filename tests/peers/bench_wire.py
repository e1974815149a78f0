"""Cost of a drafter call without the model: the replica's side, ZeroMQ, the server, and back.

    python -m tests.peers wire [--calls 2000]

The drafter is a server in another process with a model that answers at once. A step adds two tokens
to each text, and for MTP their hidden states. ``ray`` calls a Ray actor with as many bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from rich.console import Console

from specserve.compare.machine import circumstances
from specserve.core.metrics import SpeculationMetrics
from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.core.types import DraftBatch, HiddenStates, RequestControls
from specserve.drafters.base import Answer, Key, Row
from specserve.drafters.server import DrafterServer
from specserve.sources.base import SourceContext
from specserve.sources.remote import DrafterClient
from specserve.wire.messages import Card
from tests.draft_batches import propose
from tests.peers.tables import print_rows

VOCAB_SIZE, NEW_TOKENS, DRAFT_LEN = 1 << 17, 2, 3
CONTEXT_TOKENS = 60
WARM_UP_CALLS = 200
HIDDEN_SIZES = {"draft_model": (0,), "mtp": (256, 7168)}
BATCHES = (1, 8, 32)


class NoModel:
    """Holds every text, and gives all of them the same draft."""

    def __init__(self, kind: str, hidden_size: int) -> None:
        self.card = Card(
            kind=kind,
            model="none",
            vocab_size=VOCAB_SIZE,
            tokenizer="",
            hidden_size=hidden_size,
            max_tokens=1 << 20,
        )

    def draft(self, rows: Sequence[Row]) -> list[Answer]:
        """Of an MTP text it holds all but the last token."""
        last = 1 if self.card.hidden_size else 0
        drafts = [(1, 2, 3)[: row.max_draft_tokens] for row in rows]
        return [
            Answer(row.num_tokens - last, draft, (1.0,) * len(draft))
            for row, draft in zip(rows, drafts, strict=True)
        ]

    def forget(self, keys: Sequence[Key]) -> None:
        """Nothing is kept."""


@contextmanager
def served(kind: str, hidden_size: int) -> Iterator[str]:
    """Starts a drafter in another process. Yields its address."""
    command = [sys.executable, "-m", __name__, "--serve", kind, str(hidden_size)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(30)


def client(kind: str, hidden_size: int, size: int, address: str) -> DrafterClient:
    """A replica's client that is connected to the drafter."""
    metrics = SpeculationMetrics((kind,))
    context = SourceContext(
        num_slots=size,
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        metrics=metrics,
        find_drafter=lambda _: lambda: address,
    )
    options: dict[str, Any] = {"max_draft_len": DRAFT_LEN, "timeout_s": 5.0}
    config = (
        MtpConfig(kind="mtp", **options)
        if kind == "mtp"
        else DraftModelConfig(kind="draft_model", model="none", **options)
    )
    made = DrafterClient(config, context)
    while not all(each.up for each in metrics.snapshot().health):
        time.sleep(0.01)
    for slot in range(size):
        made.open(slot, RequestControls())
    return made


def measure_ours(kind: str, hidden_size: int, size: int, num_calls: int) -> list[float]:
    """Seconds of each call of ``propose`` with ``size`` requests."""
    rng = np.random.default_rng(0)
    width = CONTEXT_TOKENS + NEW_TOKENS * (num_calls + WARM_UP_CALLS + 1)
    texts = rng.integers(0, VOCAB_SIZE, (size, width)).astype(np.int32)
    states = rng.integers(0, 1 << 15, (size * CONTEXT_TOKENS, hidden_size), np.uint16)
    times = []
    with served(kind, hidden_size) as address:
        asking = client(kind, hidden_size, size, address)
        start, length = 0, CONTEXT_TOKENS
        for _ in range(num_calls + WARM_UP_CALLS):
            new = length - start - (1 if start == 0 else 0)
            hidden = HiddenStates(
                lambda rows, new=new: lambda: states[: len(rows) * new],  # type: ignore[misc]
                np.full(size, new, np.int32),
                np.full(size, start, np.int32),
            )
            batch = DraftBatch(
                np.arange(size),
                texts,
                np.full(size, length, np.int32),
                np.full(size, CONTEXT_TOKENS, np.int32),
                hidden if hidden_size else None,
            )
            began = time.perf_counter()
            drafts = propose(asking, batch, np.full(size, DRAFT_LEN, np.int32))
            times.append(time.perf_counter() - began)
            assert len(times) < 2 or (drafts.lengths == DRAFT_LEN).all()
            start, length = length - 1, length + NEW_TOKENS
        asking.end()
    return times[WARM_UP_CALLS:]


def measure_ray(num_bytes: int, num_calls: int) -> list[float]:
    """Seconds of each call that passes ``num_bytes`` bytes to an actor."""

    class Echo:
        def call(self, payload: bytes) -> int:
            return len(payload)

    actor = ray.remote(Echo).remote()
    payload, times = bytes(num_bytes), []
    for _ in range(num_calls + WARM_UP_CALLS):
        began = time.perf_counter()
        ray.get(actor.call.remote(payload))
        times.append(time.perf_counter() - began)
    ray.kill(actor)
    return times[WARM_UP_CALLS:]


def in_us(times: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    return {
        "median": round(float(np.median(times)) * 1e6),
        "p99": round(float(np.percentile(times, 99)) * 1e6),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    args = parser.parse_args(argv)
    rows = []
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    try:
        for kind, sizes in HIDDEN_SIZES.items():
            for hidden_size in sizes:
                for size in BATCHES:
                    num_bytes = size * NEW_TOKENS * (4 + 2 * hidden_size)
                    calls: dict[str, Callable[[], list[float]]] = {
                        "ours": lambda k=kind, h=hidden_size, n=size: measure_ours(  # type: ignore[misc]
                            k, h, n, args.calls
                        ),
                        "ray": lambda b=num_bytes: measure_ray(b, args.calls),  # type: ignore[misc]
                    }
                    found = {name: in_us(call()) for name, call in calls.items()}
                    rows.append(
                        {
                            "kind": kind,
                            "hidden_size": hidden_size,
                            "batch": size,
                            "bytes": num_bytes,
                            **{
                                f"{n}_{k}_us": v
                                for n, each in found.items()
                                for k, v in each.items()
                            },
                        }
                    )
    finally:
        ray.shutdown()
    print_rows(Console(), "asking a drafter, without its model", rows)
    options = {"calls": args.calls}
    print(json.dumps({"benchmark": "wire", **circumstances(), "options": options, "rows": rows}))
    return 0


def serve(kind: str, hidden_size: int) -> None:
    """Runs the drafter's process until standard input ends."""
    server = DrafterServer(NoModel(kind, hidden_size), "tcp://127.0.0.1:0")
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        raise SystemExit(main())
