"""Whatever is asked, the server goes on, and what others are told stays the same."""

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
"""Routes where a good share has to be accepted: what is refused at once tests little."""

NUM_CASES = int(os.environ.get("SPECSERVE_FUZZ_CASES", "200"))
LEAST_CASES = 400
"""With fewer, a route may get no request that it accepts."""
CASES_PER_S = 2
"""Far fewer than a quiet machine answers."""

pytestmark = pytest.mark.timeout(900 + NUM_CASES / CASES_PER_S)


def first_seed() -> int:
    """``SPECSERVE_FUZZ_SEED``, or one drawn by lot."""
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
def test_nor_where_tenants_fill_a_memory_or_an_actor_drafts(
    shared: Deployment, prefix: str, absent: set[str]
) -> None:
    api = Api(shared.base_url(prefix))
    with api.http:
        api.http.headers["Authorization"] = f"Bearer {next(iter(KEYS.values()))}"
        accepted = [each for each in ACCEPTED if each not in absent]
        # These applications have fewer of vLLM's options, and room for fewer requests.
        num_cases = max(NUM_CASES // 10, LEAST_CASES)
        check(api, accepted, 0.2, num_cases, num_streams=2, num_clients=2)


def check(
    api: Api,
    accepted: Sequence[str],
    share: float,
    num_cases: int,
    num_streams: int,
    num_clients: int,
) -> None:
    """Fuzzes while clients stream drafted texts, and checks both.

    Args:
        api: the application.
        accepted: routes where a good share has to be accepted.
        share: of what is sent to these routes.
        num_cases: how many random requests.
        num_streams: how many clients stream.
        num_clients: how many send random requests at once.
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
    counts = [report.statuses[route] for route in accepted]
    assert all(each[200] > 0 for each in counts), report.table()
    num_good = sum(each[200] for each in counts)
    assert num_good >= sum(each.total() for each in counts) * share, report.table()


def num_accepted(api: Api) -> int:
    """Draft tokens that were accepted so far, of all sources."""
    sources = api.speculation()["acceptance"].values()
    return sum(each["accepted_tokens"] for each in sources)
