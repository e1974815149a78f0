"""Two clusters for nearly all tests, one after the other: one node, and then two.

Tests that need the same deployment run one after the other, whatever their files are called, and in
one process. Those in ``served`` need what is served on one node, or replicas on two. Those in
``nodes`` need the other deployments on two nodes, or these nodes with nothing served. All others
start what they need, and run file by file in the process that is free.
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
"""What tests use of these fixtures, in the order in which each deployment is started once."""
DEPLOYMENTS = set().union(*TURNS)
FOLDERS = "served", "nodes"


class ByDeployment(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a process all tests in ``served`` or in ``nodes``, or those of another file."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])  # parameters have slashes
        return path.parent.name if path.parent.name in FOLDERS else path.name


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByDeployment:
    return ByDeployment(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    for item in items:
        turn = _turn(item)
        wanted = FOLDERS[turn >= len(SERVED)]
        is_right = turn == len(TURNS) or item.path.parent.name == wanted
        assert is_right, f"{item.nodeid} belongs into {wanted}"


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
    """The applications that most tests use, ready."""
    deployment = stage.serve(SHARED)
    deployment.await_ready()
    return deployment


@pytest.fixture
def ended(shared: Deployment, stage: Stage) -> Iterator[Deployment]:
    """The same, for a test that ends it: such tests come last."""
    yield shared
    stage.clear()


@pytest.fixture
def two_shards(stage: Stage, nodes: Stage) -> Deployment:
    """An application with two shards, ready, and one that will never be."""
    stage.end()
    deployment = nodes.serve(TWO_SHARDS)
    deployment.await_healthy()
    return deployment


@pytest.fixture
def replicated_on_nodes(stage: Stage, nodes: Stage) -> Deployment:
    """Two replicas with one memory, ready, wherever Serve puts them."""
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


@pytest.fixture(scope="session")
def faults(stage: Stage, nodes: Stage) -> Cluster:
    """Where stores and drafters are killed, and nothing is served."""
    stage.end()
    nodes.clear()
    return nodes.cluster()
