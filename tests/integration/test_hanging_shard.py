"""A shard that neither answers nor dies, as one does whose connection to another has been lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.api import Api, StreamError
from tests.integration.cluster import Cluster, Deployment, serving
from tests.integration.conftest import application
from tests.integration.test_lifecycle import LONG, replaced_by, running_stream

pytestmark = pytest.mark.timeout(900)

STEP_S = 10
"""Bound of a step, as deploy/node.env sets one; none of the small model's takes as long."""
ERROR_S = STEP_S + 30.0


@pytest.fixture(scope="module")
def app() -> Iterator[Deployment]:
    """On a cluster of its own, whose every process knows the bound."""
    cluster = Cluster([2])
    cluster.environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(STEP_S)
    try:
        cluster.start()
        with serving(cluster, {"/": application()}) as app:
            yield app
    finally:
        cluster.stop()


def test_a_shard_that_hangs_fails_its_requests_and_the_replica_is_replaced(app: Deployment) -> None:
    cluster, api = app.cluster, Api(app.base_url())
    before = cluster.engine_processes()
    assert len(before) == 3
    with running_stream(api, **LONG) as outcome:
        (shard,) = cluster.shards()
        shard.suspend()
        assert isinstance(outcome(ERROR_S), StreamError)

    replaced_by(cluster, before, app)
    answer = api.complete(prompt="x = 1\n", max_tokens=8)
    assert answer["usage"]["completion_tokens"] == 8


def test_one_that_hangs_while_nothing_runs_is_replaced_when_it_is_asked_what_it_counted(
    app: Deployment,
) -> None:
    before = app.cluster.engine_processes()
    (shard,) = app.cluster.shards()
    shard.suspend()
    Api(app.base_url()).speculation()
    replaced_by(app.cluster, before, app)
