"""Whatever is asked, the server goes on, and what others are told stays the same."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator

import pytest

from tests.integration.api import Api
from tests.integration.cluster import Deployment
from tests.integration.conftest import Stage, application
from tests.integration.fuzz import Report, fuzz
from tests.integration.fuzz_background import Streams

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.timeout(900)

ACCEPTED = (
    *("POST /v1/completions", "POST /v1/chat/completions", "POST /v1/chat/completions/batch"),
    *("POST /v1/responses", "POST /v1/messages", "POST /tokenize", "POST /detokenize"),
    "POST /inference/v1/generate",
)
"""Routes where a good share has to be accepted: what is refused at once tests little."""


def first_seed() -> int:
    """``SPECSERVE_FUZZ_SEED``, or one drawn by lot."""
    return int(os.environ.get("SPECSERVE_FUZZ_SEED") or secrets.randbelow(1 << 32))


def attack(api: Api, *, num_cases: int, num_clients: int, full: bool) -> Report:
    """Fuzzes while clients stream drafted texts, and checks both."""
    number = first_seed()
    logger.warning("SPECSERVE_FUZZ_SEED=%d", number)  # shown where the test fails
    before = api.counts()
    streams = Streams(api, num_clients)
    with streams.running():
        report = fuzz(api.base_url, num_cases, number, full=full)
    logger.warning("%s\nstreams of each client: %s", report.table(), streams.num_same.values())
    assert report.failures == []
    assert streams.others == []
    assert all(streams.num_same.values())
    assert api.counts().since(before).accepted_tokens > 0
    return report


def test_random_requests_do_no_harm(api: Api) -> None:
    report = attack(api, num_cases=180, num_clients=2, full=False)
    counts = [report.statuses[route] for route in ACCEPTED]
    assert all(each[200] > 0 for each in counts), report.table()
    num_accepted = sum(each[200] for each in counts)
    assert num_accepted >= sum(each.total() for each in counts) * 0.4, report.table()


@pytest.fixture
def wide(stage: Stage) -> Iterator[Deployment]:
    """An application with room for eight streams beside what is tried."""
    args = application(engine={"max_num_seqs": 16}, http={"max_queued_requests": 32})
    deployment = stage.serve({"/": args})
    deployment.await_ready()
    yield deployment
    stage.clear()


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_random_requests_do_no_harm(wide: Deployment) -> None:
    api = Api(wide.base_url())
    with api.http:
        attack(api, num_cases=10_000, num_clients=8, full=True)
