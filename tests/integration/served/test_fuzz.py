"""Whatever is asked, the server goes on, and what others are told stays the same."""

from __future__ import annotations

import logging
import os
import secrets

import pytest

from tests.integration.api import Api
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


NUM_CLIENTS = 8
NUM_CASES = int(os.environ.get("SPECSERVE_FUZZ_CASES", "200"))
CASES_PER_S = 2
"""Far fewer than a quiet machine answers."""


def first_seed() -> int:
    """``SPECSERVE_FUZZ_SEED``, or one drawn by lot."""
    return int(os.environ.get("SPECSERVE_FUZZ_SEED") or secrets.randbelow(1 << 32))


@pytest.mark.timeout(900 + NUM_CASES / CASES_PER_S)
def test_random_requests_do_no_harm(api: Api) -> None:
    """Fuzzes while clients stream drafted texts, and checks both."""
    number = first_seed()
    logger.warning("SPECSERVE_FUZZ_SEED=%d", number)  # shown where the test fails
    found = operations(api.base_url)
    cases = random_cases(found, NUM_CASES, number)
    streams = Streams(api, NUM_CLIENTS)
    before = api.counts()
    with streams.running():
        report = send(api.base_url, cases, odd_bodies(found))
    logger.warning("%s\nstreams of each client: %s", report.table(), streams.num_same.values())
    assert not report.failures, "\n".join(report.failures)
    assert streams.others == []
    assert all(streams.num_same.values())
    assert api.counts().since(before).accepted_tokens > 0
    counts = [report.statuses[route] for route in ACCEPTED]
    assert all(each[200] > 0 for each in counts), report.table()
    num_accepted = sum(each[200] for each in counts)
    assert num_accepted >= sum(each.total() for each in counts) * 0.4, report.table()
