"""Decoding while others ask for metrics: what they ask for must not slow it."""

from __future__ import annotations

import http.client
import logging
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.integration.api import TIMEOUT_S, Api
from tests.integration.applications import MAX_NUM_SEQS, application
from tests.integration.cluster import HAPROXY
from tests.integration.stage import Stage

logger = logging.getLogger(__name__)

GETS_PER_S = 200
NUM_CONNECTIONS = 4
NUM_ROUNDS = 40
NUM_TOKENS = 384
PROMPT = "for number in numbers:\n    total += number\n" * 4
BASELINE = "/-/healthz"
"""HAProxy answers it by itself: what it costs is the price of the client and of HAProxy."""
SHARED = ("/metrics", "/v1/speculation", "/speculation/data")
PATHS = ("", BASELINE, *SHARED)
MOST_LOST = 0.02

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not HAPROXY.exists(), reason="Ray brings HAProxy for Linux only"),
]


@pytest.fixture
def api(stage: Stage) -> Iterator[Api]:
    """Behind HAProxy, as `make serve` serves."""
    deployment = stage.serve({"/": application()})
    deployment.await_ready()
    api = Api(deployment.base_url())
    with api.http:
        yield api


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


def test_those_who_watch_cost_no_more_than_what_the_proxy_answers_alone(api: Api) -> None:
    tokens_per_second(api)  # compiles, and learns what pays
    measured: dict[str, list[float]] = {path: [] for path in PATHS}
    rates: dict[str, list[float]] = {path: [] for path in PATHS}
    for _ in range(NUM_ROUNDS):
        for path in random.sample(PATHS, len(PATHS)):
            with asking(api.base_url, path) as num_asked:
                began_s = time.perf_counter()
                measured[path].append(tokens_per_second(api))
                rates[path].append(sum(num_asked) / (time.perf_counter() - began_s))
    ratios = {}
    for path in PATHS:
        rounds = zip(measured[path], measured[BASELINE], strict=True)
        ratios[path] = statistics.median(each / baseline for each, baseline in rounds)
        logger.warning(
            "%-18s %7.1f tokens/s, %.3f of %s, %.0f GET/s",
            path or "none",
            statistics.median(measured[path]),
            ratios[path],
            BASELINE,
            statistics.median(rates[path]),
        )
    assert all(ratios[path] >= 1 - MOST_LOST for path in SHARED), ratios
