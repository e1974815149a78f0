"""A process of `bench_replication`: replicas that write, or a caller that saturates the store.

The benchmark starts it. It writes its results as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
import psutil
import ray

from specserve.trie.records import (
    MAX_RECORD_TOKENS,
    ExchangeReply,
    ExchangeRequest,
    Record,
    TextPiece,
)
from specserve.trie.replica import BATCH_BYTES, ReplicaOptions, TrieReplica
from specserve.trie.store import StoreOptions
from specserve.trie.store_actor import RayStoreClient, get_or_start
from specserve.trie.unsent import FULL_TOKENS, MAX_DELAY_S

VOCAB_SIZE = 130_000
NAMESPACE = "ab" * 16
STREAMS = 32
"""Number of requests that a replica decodes at a time."""
STEP_S = 0.02
OUTSTANDING = 8
"""Number of calls that the busy caller has in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of a host.

    Attributes:
        address: address of the cluster.
        fingerprint: fingerprint of the store. Each measurement has a new store.
        num_replicas: number of links in this process.
        tokens_per_s: tokens that they write together; 0: keep the store busy instead.
        record_tokens: tokens of the busy caller's records; 0: only read.
        seconds: duration.
        seed: seed of the tokens.
    """

    address: str
    fingerprint: str
    num_replicas: int = 1
    tokens_per_s: float = 0.0
    record_tokens: int = 0
    seconds: float = 15.0
    seed: int = 0


def write(task: Task, store: StoreOptions) -> dict[str, Any]:
    """Runs replicas with ``STREAMS`` requests each. Returns the age of received tokens."""
    lags_s: list[float] = []
    options = ReplicaOptions()
    links = [
        TrieReplica(
            RayStoreClient(store),
            lambda record: lags_s.append(time.time() - record.stamp),
            options,
        )
        for _ in range(task.num_replicas)
    ]
    for link in links:
        link.start()
    while not all(link.up for link in links):
        time.sleep(0.05)
    await_the_others()
    lags_s.clear()
    process, began = psutil.Process(), time.monotonic()
    cpu = process.cpu_times()
    written, publish_s, calls = 0, 0.0, 0
    waiting_since = time.time()
    rng = np.random.default_rng(task.seed)
    while (elapsed := time.monotonic() - began) < task.seconds:
        due = int(elapsed * task.tokens_per_s / task.num_replicas / STREAMS) - written
        if due < FULL_TOKENS and time.time() < waiting_since + MAX_DELAY_S:
            time.sleep(STEP_S)  # like a source that collects its texts
            continue
        tokens = rng.integers(0, VOCAB_SIZE, size=(STREAMS, due), dtype=np.int32)
        before = time.perf_counter()
        for link in links if due else ():
            for stream in range(STREAMS):
                name = f"{link.origin}-{stream}"
                piece = TextPiece(NAMESPACE, name, written, tokens[stream], stamp=waiting_since)
                link.publish(piece)
                calls += 1
        publish_s += time.perf_counter() - before
        written += due
        waiting_since = time.time()
        time.sleep(STEP_S)
    spent = process.cpu_times()
    drained = [link.stop(30) for link in links]
    return {
        "written_tokens": written * STREAMS * task.num_replicas,
        "received_tokens": sum(link.received_tokens for link in links),
        "lags_s": lags_s,
        "publish_us": 1e6 * publish_s / max(calls, 1),
        "cpu": (spent.user + spent.system - cpu.user - cpu.system) / task.seconds,
        "dropped_tokens": sum(link.dropped_tokens for link in links),
        "drained": all(drained),
    }


def keep_busy(task: Task, store: StoreOptions) -> dict[str, Any]:
    """Calls the store as fast as it answers, to send new records or to read its log."""
    actor = get_or_start(store)
    encode = msgspec.msgpack.encode
    rng = np.random.default_rng(task.seed)
    size = task.record_tokens or 64
    tokens = rng.integers(0, VOCAB_SIZE, MAX_RECORD_TOKENS, dtype=np.int32).tobytes()[: 4 * size]
    some = Record("o" * 16, 1, 0.0, NAMESPACE, "text", "s" * 32, 0, tokens)
    count = BATCH_BYTES // some.num_bytes
    numbers = iter(range(1, 1 << 40))

    def request(records: int, max_bytes: int) -> bytes:
        made = [msgspec.structs.replace(some, number=next(numbers)) for _ in range(records)]
        return encode(ExchangeRequest("caller", epoch, 0, made, max_bytes))

    epoch = ""
    first = ray.get(
        actor.exchange_encoded.remote(request(count if not task.record_tokens else 0, 0))
    )
    epoch = msgspec.msgpack.decode(first, type=ExchangeReply).epoch
    reading = encode(ExchangeRequest("reader", epoch, 0, [], BATCH_BYTES))
    prepared: deque[bytes] = deque()
    enough = threading.Semaphore(64)

    def prepare() -> None:
        while True:
            enough.acquire()
            prepared.append(request(count, 0) if task.record_tokens else reading)

    threading.Thread(target=prepare, daemon=True).start()
    await_the_others()
    began, calls = time.monotonic(), 0
    waiting: deque[Any] = deque()
    while time.monotonic() - began < task.seconds:
        while len(waiting) < OUTSTANDING:
            if not prepared:
                time.sleep(0.0005)
                continue
            waiting.append(actor.exchange_encoded.remote(prepared.popleft()))
            enough.release()
        ray.get(waiting.popleft())
        calls += 1
    return {
        "tokens_per_s": calls * count * size / task.seconds,
        "calls_per_s": calls / task.seconds,
    }


def await_the_others() -> None:
    """Waits until the benchmark starts all hosts."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


def main() -> None:
    """Runs the task that the command line gives as JSON."""
    task = Task(**json.loads(sys.argv[1]))
    ray.init(task.address, log_to_driver=False, logging_level="ERROR")
    store = StoreOptions(fingerprint=task.fingerprint, vocab_size=VOCAB_SIZE)
    found = write(task, store) if task.tokens_per_s else keep_busy(task, store)
    sys.stdout.write(json.dumps({**asdict(task), **found}) + "\n")


if __name__ == "__main__":
    main()
