"""Random requests neither break the server nor change other answers."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence

import pytest

from tests.integration.api import Api
from tests.integration.applications import KEYS
from tests.integration.cluster import Deployment
from tests.integration.fuzz import odd_bodies, operations, random_cases, send
from tests.integration.fuzz_background import Streams

logger = logging.getLogger(__name__)

ACCEPTED = (
    *("POST /v1/completions", "POST /v1/chat/completions", "POST /v1/chat/completions/batch"),
    *("POST /v1/responses", "POST /v1/messages", "POST /tokenize", "POST /detokenize"),
    *("POST /inference/v1/generate", "POST /generative_scoring"),
    *("POST /generate", "POST /generate_stream", "POST /"),
)
"""Routes that must accept a good share of the requests. A refused request tests little."""

NUM_CASES = int(os.environ.get("SPECSERVE_FUZZ_CASES", "100"))
MIN_CASES = 400
"""With fewer cases, a route may accept no request."""
CASES_PER_S = 2
"""A quiet machine answers far more."""

pytestmark = pytest.mark.timeout(900 + NUM_CASES / CASES_PER_S)


def first_seed() -> int:
    """``SPECSERVE_FUZZ_SEED``, or a random seed."""
    return int(os.environ.get("SPECSERVE_FUZZ_SEED") or secrets.randbelow(1 << 32))


def test_random_requests_do_no_harm(api: Api) -> None:
    check(api, ACCEPTED, 0.4, NUM_CASES, num_streams=8, num_clients=4)


@pytest.mark.parametrize(
    ("prefix", "absent"),
    [
        ("/team", {"POST /inference/v1/generate"}),
        (
            "/drafter",
            {
                *("POST /inference/v1/generate", "POST /generate"),
                *("POST /generate_stream", "POST /"),
            },
        ),
    ],
)
def test_random_requests_do_no_harm_to_tenants_or_drafters(
    shared: Deployment, prefix: str, absent: set[str]
) -> None:
    api = Api(shared.base_url(prefix))
    with api.http:
        api.http.headers["Authorization"] = f"Bearer {next(iter(KEYS.values()))}"
        accepted = [each for each in ACCEPTED if each not in absent]
        # These applications have fewer options of vLLM, and take fewer requests at once.
        num_cases = max(NUM_CASES // 10, MIN_CASES)
        check(api, accepted, 0.2, num_cases, num_streams=2, num_clients=2)


def check(
    api: Api,
    accepted: Sequence[str],
    share: float,
    num_cases: int,
    num_streams: int,
    num_clients: int,
) -> None:
    """Sends random requests while clients stream texts with drafts, and checks both.

    Args:
        api: the application.
        accepted: routes that must accept a good share of the requests.
        share: that share, over all these routes.
        num_cases: number of random requests. From ``MIN_CASES`` on each of the routes must accept
            one.
        num_streams: clients that stream.
        num_clients: clients that send random requests.
    """
    number = first_seed()
    logger.warning("SPECSERVE_FUZZ_SEED=%d", number)  # shown where the test fails
    found = operations(api.http)
    cases = random_cases(found, num_cases, number)
    streams = Streams(api, num_streams)
    before = num_accepted(api)
    with streams.running():
        report = send(api.http, cases, odd_bodies(found), num_clients)
    logger.warning("%s\nstreams of each client: %s", report.table(), streams.num_same.values())
    assert not report.failures, "\n".join(report.failures)
    assert streams.others == []
    assert all(streams.num_same.values())
    assert streams.num_left > 0
    assert num_accepted(api) > before
    reasons = [each["reason"] for each in api.speculation()["sources"]]
    assert not any(each.startswith("drafting ended") for each in reasons), reasons
    counts = [report.statuses[route] for route in accepted]
    if num_cases >= MIN_CASES:
        assert all(each[200] > 0 for each in counts), report.table()
    num_good = sum(each[200] for each in counts)
    assert num_good > 0, report.table()
    assert num_good >= sum(each.total() for each in counts) * share, report.table()


def num_accepted(api: Api) -> int:
    """Accepted draft tokens of all sources so far."""
    sources = api.speculation()["acceptance"].values()
    return sum(each["accepted_tokens"] for each in sources)
