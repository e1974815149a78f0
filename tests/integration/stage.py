"""A cluster with one deployment at a time. Both are started when a test needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tests.integration.applications import KEYS
from tests.integration.cluster import HAPROXY, Cluster, Deployment

NUM_CPUS_ALONE = 6
"""CPUs that the node of a one-node cluster declares."""
NUM_CPUS = 2
"""CPUs that each node of a two-node cluster declares."""
STEP_S = 20
"""Time limit of a step, as in deploy/node.env. The small model's steps are far shorter."""


class Stage:
    """Keeps one deployment running as long as tests need the same one.

    Args:
        new_cluster: creates the cluster, which is not started yet.
    """

    def __init__(self, new_cluster: Callable[[], Cluster]) -> None:
        self._new_cluster = new_cluster
        self._cluster: Cluster | None = None
        self._applications: object = None
        self._deployment: Deployment | None = None

    def cluster(self) -> Cluster:
        """The running cluster. One whose daemons have died is replaced."""
        if self._cluster is not None and self._cluster.dead_daemons():
            with suppress(Exception):  # nothing of it ends as it should
                self.end()
        if self._cluster is None:
            self._cluster = self._new_cluster()
            self._cluster.start()
        return self._cluster

    def serve(self, applications: Mapping[str, Mapping[str, Any]]) -> Deployment:
        """A deployment of these applications. If it was just started, it is not ready yet."""
        cluster = self.cluster()
        if self._deployment is None or applications != self._applications:
            self.clear()
            self._deployment = Deployment(cluster, applications)
            self._applications = applications
        return self._deployment

    def clear(self) -> None:
        """Stops the deployment, if there is one."""
        deployment, self._deployment = self._deployment, None
        if deployment is not None:
            deployment.stop()

    def end(self) -> None:
        """Stops the deployment and the cluster, so that another cluster has the whole machine."""
        try:
            self.clear()
        finally:
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                cluster.stop()


def one_node() -> Cluster:
    """One node behind HAProxy, as with `make serve` if Ray brings HAProxy."""
    cluster = _new_cluster(NUM_CPUS_ALONE)
    if HAPROXY.exists():
        cluster.use_haproxy()
    cluster.environment |= KEYS | {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    return cluster


def two_nodes() -> Cluster:
    """Two nodes behind Ray's own proxy. HAProxy cannot reach another node's loopback address."""
    return _new_cluster(NUM_CPUS, NUM_CPUS)


def _new_cluster(*num_cpus: int) -> Cluster:
    cluster = Cluster(num_cpus)
    cluster.environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(STEP_S)
    return cluster
