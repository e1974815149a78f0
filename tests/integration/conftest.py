"""Two clusters for nearly all tests, one after the other: one node, then two nodes.

Tests that need the same deployment run one after the other in one process. Tests in ``served`` need
the applications on one node, or replicas on two nodes. Tests in ``nodes`` need another deployment
on two nodes, or two nodes with no deployment. The tests that compare with one engine without
speculation also run in one process. All other tests start what they need, and run file by file in a
free process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tests.integration.api import Api
from tests.integration.applications import SHARED, TWO_SHARDS
from tests.integration.cluster import Cluster, Deployment
from tests.integration.stage import Stage, one_node, two_nodes

SERVED = [{"shared"}, {"shared", "ended"}, {"replicated_on_nodes"}]
ON_NODES = [{"two_shards"}, {"mistakes"}, {"faults"}]
TURNS = [*SERVED, *ON_NODES]
"""Sets of fixtures that tests use, in an order in which each deployment is started once."""
DEPLOYMENTS = set().union(*TURNS)
FOLDERS = "served", "nodes"
OF_ONE_ENGINE = "test_exactness.py", "test_in_engine.py", "test_sampling_is_unbiased.py"
"""Files whose tests use the fixture ``none_engine``."""


class ByDeployment(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a process all tests in ``served``, in ``nodes``, of one engine, or of another file."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])  # parameters contain slashes
        if path.name in OF_ONE_ENGINE:
            return "one engine"
        return path.parent.name if path.parent.name in FOLDERS else path.name


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByDeployment:
    return ByDeployment(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    for item in items:
        turn = _turn(item)
        wanted = FOLDERS[turn >= len(SERVED)]
        is_right = turn == len(TURNS) or item.path.parent.name == wanted
        assert is_right, f"{item.nodeid} belongs in {wanted}"
        if "none_engine" in getattr(item, "fixturenames", ()):
            assert item.path.name in OF_ONE_ENGINE


def _turn(item: pytest.Item) -> int:
    used = DEPLOYMENTS.intersection(getattr(item, "fixturenames", ()))
    return TURNS.index(used) if used else len(TURNS)


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """One node behind HAProxy."""
    yield from _ended(Stage(one_node))


@pytest.fixture(scope="session")
def nodes() -> Iterator[Stage]:
    """Two nodes behind Ray's own proxy."""
    yield from _ended(Stage(two_nodes))


def _ended(stage: Stage) -> Iterator[Stage]:
    try:
        yield stage
    finally:
        stage.end()


@pytest.fixture
def shared(stage: Stage) -> Deployment:
    """A ready deployment of the applications that most tests use."""
    deployment = stage.serve(SHARED)
    deployment.await_ready()
    return deployment


@pytest.fixture
def ended(shared: Deployment, stage: Stage) -> Iterator[Deployment]:
    """The same deployment, for a test that stops it. Such tests run last."""
    yield shared
    stage.clear()


@pytest.fixture
def two_shards(stage: Stage, nodes: Stage) -> Deployment:
    """A ready application with two shards, and one that fits on no node."""
    stage.end()
    deployment = nodes.serve(TWO_SHARDS)
    deployment.await_healthy()
    return deployment


@pytest.fixture
def replicated_on_nodes(stage: Stage, nodes: Stage) -> Deployment:
    """Two ready replicas with one draft memory, on the nodes that Serve chooses."""
    stage.end()
    deployment = nodes.serve({"/two": SHARED["/two"]})
    deployment.await_ready()
    return deployment


@pytest.fixture
def api(shared: Deployment) -> Iterator[Api]:
    """A client of the application at the root."""
    api = Api(shared.base_url())
    with api.http:
        yield api


@pytest.fixture(scope="module")
def faults(stage: Stage, nodes: Stage) -> Cluster:
    """A cluster with no deployment, in which tests kill stores and drafters."""
    stage.end()
    nodes.clear()
    return nodes.cluster()
