"""Requests for metrics must not slow down decoding.

The client shares the cores with the model. It is h2load, which keeps a fixed rate and uses a
hundredth of a core. Rounds with requests alternate with rounds without any.
"""

from __future__ import annotations

import logging
import math
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.api import TIMEOUT_S, Api
from tests.integration.applications import MAX_NUM_SEQS, application
from tests.integration.cluster import HAPROXY, eventually
from tests.integration.stage import Stage

logger = logging.getLogger(__name__)

GETS_PER_S = 200
NUM_CONNECTIONS = 4
NUM_ROUNDS = 60
NUM_TOKENS = 384
PROMPT = "for number in numbers:\n    total += number\n" * 4
NO_REQUESTS = "no requests"
PROXY = "/-/healthz"
"""HAProxy answers it alone, so it measures the cost of the client and of HAProxy."""
SHARED = ("/metrics", "/v1/speculation", "/speculation/data")
WATCHED = (NO_REQUESTS, PROXY, *SHARED)
MAX_LOST = 0.02
MAX_S = 600
"""Time after which h2load ends by itself."""

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not HAPROXY.exists(), reason="Ray brings HAProxy for Linux only"),
    pytest.mark.skipif(shutil.which("h2load") is None, reason="needs nghttp2-client's h2load"),
]


@pytest.fixture
def api(stage: Stage) -> Iterator[Api]:
    """A client of an application behind HAProxy, as with `make serve`."""
    deployment = stage.serve({"/": application()})
    deployment.await_ready()
    api = Api(deployment.base_url())
    with api.http:
        yield api


def tokens_per_second(api: Api) -> float:
    """Throughput of one full batch of requests."""
    began_s = time.perf_counter()
    with ThreadPoolExecutor(MAX_NUM_SEQS) as pool:
        answers = pool.map(
            lambda _: api.complete(
                prompt=PROMPT,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                vllm_xargs={"speculation": "off"},  # so that every round has as many steps
            ),
            range(MAX_NUM_SEQS),
        )
        num_tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return float(num_tokens / (time.perf_counter() - began_s))


@contextmanager
def asking(url: str, log: Path) -> Iterator[None]:
    """Sends GETs at the rate for the length of a block. Checks the rate and every answer."""
    command = [
        *("h2load", "--h1", "--clients", str(NUM_CONNECTIONS), "--threads", "1"),
        *("--rps", str(GETS_PER_S // NUM_CONNECTIONS), "--duration", str(MAX_S)),
        *("--log-file", str(log), url),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as client:
        try:
            eventually(lambda: log.exists() and log.stat().st_size, "h2load asks", TIMEOUT_S, 0.01)
            yield
        finally:
            client.terminate()
    answers = [line.split("\t") for line in log.read_text().splitlines()]
    log.unlink()
    assert {status for _, status, _ in answers} == {"200"}, url
    took_s = (int(answers[-1][0]) - int(answers[0][0])) / 1e6
    assert len(answers) / took_s == pytest.approx(GETS_PER_S, rel=0.05), url


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of a median, from order statistics."""
    outside = math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2)
    ordered = sorted(ratios)
    return ordered[max(outside - 1, 0)], ordered[-max(outside, 1)]


def test_monitoring_costs_at_most_two_percent(api: Api, tmp_path: Path) -> None:
    tokens_per_second(api)  # warms up
    rounds: list[dict[str, float]] = []
    for _ in range(NUM_ROUNDS):
        measured = {}
        for path in random.sample(WATCHED, len(WATCHED)):
            if path == NO_REQUESTS:
                measured[path] = tokens_per_second(api)
                continue
            with asking(api.base_url + path, tmp_path / "log"):
                measured[path] = tokens_per_second(api)
        rounds.append(measured)
    ratios = {path: [each[path] / each[NO_REQUESTS] for each in rounds] for path in WATCHED}
    for path in WATCHED:
        logger.warning(
            "%-18s %7.1f tokens/s, %.3f of the speed without requests, between %.3f and %.3f",
            path,
            statistics.median(each[path] for each in rounds),
            statistics.median(ratios[path]),
            *interval(ratios[path]),
        )
    together = [ratio for path in SHARED for ratio in ratios[path]]
    assert statistics.median(together) >= 1 - MAX_LOST
    for path in SHARED:  # a single path is measured to a few percent only
        assert interval(ratios[path])[1] >= 1 - MAX_LOST, path
