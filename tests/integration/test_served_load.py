"""Decoding while others ask for metrics: what they ask for must not slow it."""

from __future__ import annotations

import http.client
import logging
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.integration.api import TIMEOUT_S, Api
from tests.integration.conftest import MAX_NUM_SEQS

logger = logging.getLogger(__name__)

GETS_PER_S = 200
NUM_CONNECTIONS = 4
NUM_ROUNDS = 7
NUM_TOKENS = 384
PROMPT = "for number in numbers:\n    total += number\n" * 4
BASELINE = "/health"
"""An answer that costs nothing: what remains is the price of a GET in the proxy and the replica."""
PATHS = ("", BASELINE, "/metrics", "/v1/speculation", "/speculation/data")
MOST_LOST = 0.02


def tokens_per_second(api: Api) -> float:
    """Throughput of as many requests as are decoded at once."""
    began_s = time.perf_counter()
    with ThreadPoolExecutor(MAX_NUM_SEQS) as pool:
        answers = pool.map(
            lambda _: api.complete(prompt=PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True),
            range(MAX_NUM_SEQS),
        )
        num_tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return float(num_tokens / (time.perf_counter() - began_s))


@contextmanager
def asking(base_url: str, path: str) -> Iterator[list[int]]:
    """GETs at a steady rate for the length of a block; yields how many each connection has made."""
    address = urlsplit(base_url).netloc
    is_over = threading.Event()
    num_asked = [0] * (NUM_CONNECTIONS if path else 0)

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        began_s = time.perf_counter()
        while not is_over.is_set():
            connection.request("GET", path)
            answer = connection.getresponse()
            said = answer.read()
            assert answer.status == 200, f"{path}: {answer.status} {said!r:.300}"
            num_asked[number] += 1
            due_s = began_s + num_asked[number] * NUM_CONNECTIONS / GETS_PER_S
            is_over.wait(max(0, due_s - time.perf_counter()))
        connection.close()

    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        asks = [pool.submit(ask, number) for number in range(len(num_asked))]
        try:
            yield num_asked
        finally:
            is_over.set()
        for each in asks:
            each.result()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_those_who_watch_cost_no_more_than_any_get(api: Api) -> None:
    tokens_per_second(api)  # compiles, and learns what pays
    measured: dict[str, list[float]] = {path: [] for path in PATHS}
    rates: dict[str, list[float]] = {path: [] for path in PATHS}
    for _ in range(NUM_ROUNDS):
        for path in PATHS:
            with asking(api.base_url, path) as num_asked:
                began_s = time.perf_counter()
                measured[path].append(tokens_per_second(api))
                rates[path].append(sum(num_asked) / (time.perf_counter() - began_s))
    medians = {path: statistics.median(each) for path, each in measured.items()}
    for path in PATHS:
        told = (path or "none", medians[path], medians[path] / medians[BASELINE])
        logger.warning(
            "%-18s %7.1f tokens/s, %.3f of /health, %.0f GET/s",
            *told,
            statistics.median(rates[path]),
        )
    for path in PATHS[2:]:
        assert medians[path] >= (1 - MOST_LOST) * medians[BASELINE], medians
