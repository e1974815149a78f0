"""One Ray cluster of two nodes for all tests, and one application on it at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.integration.api import Api
from tests.integration.cluster import Cluster, Deployment, model_path, running_cluster, serving

MAX_NUM_SEQS, MAX_QUEUED = 4, 2

ENGINE: dict[str, Any] = {
    "dtype": "float32",  # in which the same greedy tokens are an equality and no matter of luck
    "max_model_len": 2048,
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": 2048,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "vllm": {
        # A small model left to itself may put blanks into JSON for ever.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    },
}


def application(**sections: Mapping[str, Any]) -> dict[str, Any]:
    """``args`` of an application that serves the draft model; sections are merged into it."""
    base: dict[str, Any] = {
        "model": {"path": str(model_path("demo-draft")), "served_name": "demo"},
        "engine": ENGINE,
        # Every draft is sent, also the ones that do not pay.
        "speculation": [{"kind": "ngram", "max_draft_len": 6, "dynamic": False}],
        "placement": {"num_cpus_per_shard": 1},
        "http": {"max_queued_requests": MAX_QUEUED, "retry_after_s": 3},
    }
    return base | {key: {**base[key], **section} for key, section in sections.items()}


class Stage:
    """Keeps one deployment running, for as long as tests ask for the same one.

    Args:
        cluster: where it runs.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._applications: object = None
        self._deployment: Deployment | None = None

    def serve(self, applications: Mapping[str, Mapping[str, Any]]) -> Deployment:
        """A deployment of these applications, not yet ready if it had to be started."""
        if self._deployment is None or applications != self._applications:
            self.clear()
            self._deployment = Deployment(self.cluster, applications)
            self._applications = applications
        return self._deployment

    def clear(self) -> None:
        """Ends what runs, if anything does."""
        deployment, self._deployment = self._deployment, None
        if deployment is not None:
            deployment.stop()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two Ray nodes on this machine, which declare two CPUs each."""
    with running_cluster(2, 2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def stage(cluster: Cluster) -> Iterator[Stage]:
    """What is served on the cluster."""
    stage = Stage(cluster)
    try:
        yield stage
    finally:
        stage.clear()


@pytest.fixture
def app(stage: Stage) -> Deployment:
    """The application that most tests use, ready."""
    deployment = stage.serve({"/": application()})
    deployment.await_ready()
    return deployment


@pytest.fixture
def api(app: Deployment) -> Iterator[Api]:
    """A client of ``app``."""
    api = Api(app.base_url())
    with api.http:
        yield api


@pytest.fixture(scope="module")
def behind_haproxy(stage: Stage) -> Iterator[Deployment]:
    """The application that most tests use, on a cluster of its own behind HAProxy, ready."""
    stage.clear()  # two applications at a time would be slow
    cluster = Cluster([2])
    cluster.use_haproxy()
    try:
        cluster.start()
        with serving(cluster, {"/": application()}) as deployment:
            yield deployment
    finally:
        cluster.stop()
