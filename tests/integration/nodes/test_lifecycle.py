from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from tests.integration.api import Api, StreamError
from tests.integration.cluster import Deployment, suspend
from tests.integration.running import ERROR_S, LONG, SEVERAL, replaced, running_stream
from tests.integration.stage import STEP_S

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def of_two_shards(two_shards: Deployment) -> Iterator[Api]:
    """A client of the application with two shards."""
    api = Api(two_shards.base_url())
    with api.http:
        yield api


@pytest.mark.parametrize("victim", ["shards", "engine_cores", "replicas"])
def test_a_killed_process_fails_its_requests_and_the_replica_is_replaced(
    of_two_shards: Api, two_shards: Deployment, victim: str
) -> None:
    cluster = two_shards.cluster
    before = cluster.engine_processes()
    assert len(before) == 4
    with running_stream(of_two_shards, **LONG, **SEVERAL) as outcome:
        getattr(cluster, victim)()[0].kill()
        error = outcome(ERROR_S)
    assert isinstance(error, StreamError | httpx.HTTPError), "the stream ended without an error"

    replaced(two_shards, before)
    answer = of_two_shards.complete(prompt="x = 1\n", max_tokens=8)
    assert answer["usage"]["completion_tokens"] == 8


def test_a_shard_that_hangs_fails_its_requests_and_the_replica_is_replaced(
    of_two_shards: Api, two_shards: Deployment
) -> None:
    """The shard neither answers nor dies, like a shard that has lost its connection."""
    before = two_shards.cluster.engine_processes()
    with running_stream(of_two_shards, **LONG) as outcome:
        suspend(two_shards.cluster.shards()[0])
        error = outcome(STEP_S + 30.0)
    assert isinstance(error, StreamError | httpx.HTTPError), "the stream ended without an error"

    replaced(two_shards, before)
    answer = of_two_shards.complete(prompt="x = 1\n", max_tokens=8)
    assert answer["usage"]["completion_tokens"] == 8


def test_a_replica_with_an_idle_hanging_shard_is_replaced_when_its_counts_are_asked(
    of_two_shards: Api, two_shards: Deployment
) -> None:
    before = two_shards.cluster.engine_processes()
    suspend(two_shards.cluster.shards()[0])
    with suppress(httpx.TimeoutException):  # Serve may hold the request for the next replica
        assert of_two_shards.http.get("/v1/speculation", timeout=10).status_code == 200
    replaced(two_shards, before)
