"""A cluster and one deployment on it at a time, both started when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.integration.applications import KEYS
from tests.integration.cluster import HAPROXY, Cluster, Deployment

NUM_CPUS_ALONE = 6
"""CPUs that a single node declares."""
NUM_CPUS = 2
"""The same, of each of two nodes."""
STEP_S = 20
"""Bound of a step, as deploy/node.env sets one; none of the small model's takes as long."""


class Stage:
    """Keeps one deployment running, for as long as tests ask for the same one.

    Args:
        new_cluster: makes the cluster, not yet started.
    """

    def __init__(self, new_cluster: Callable[[], Cluster]) -> None:
        self._new_cluster = new_cluster
        self._cluster: Cluster | None = None
        self._applications: object = None
        self._deployment: Deployment | None = None

    def cluster(self) -> Cluster:
        """The cluster, which runs."""
        if self._cluster is None:
            self._cluster = self._new_cluster()
            self._cluster.start()
        return self._cluster

    def serve(self, applications: Mapping[str, Mapping[str, Any]]) -> Deployment:
        """A deployment of these applications, not yet ready if it had to be started."""
        if self._deployment is None or applications != self._applications:
            self.clear()
            self._deployment = Deployment(self.cluster(), applications)
            self._applications = applications
        return self._deployment

    def clear(self) -> None:
        """Ends what is served, if anything is."""
        deployment, self._deployment = self._deployment, None
        if deployment is not None:
            deployment.stop()

    def end(self) -> None:
        """Ends what is served, and the cluster: another one has the machine for itself."""
        try:
            self.clear()
        finally:
            cluster, self._cluster = self._cluster, None
            if cluster is not None:
                cluster.stop()


def one_node() -> Cluster:
    """Behind HAProxy, as `make serve` serves where Ray's binary is there."""
    cluster = _new_cluster(NUM_CPUS_ALONE)
    if HAPROXY.exists():
        cluster.use_haproxy()
    cluster.environment |= KEYS | {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    return cluster


def two_nodes() -> Cluster:
    """Behind Ray's own proxy: HAProxy on one node reaches no loopback address of another."""
    return _new_cluster(NUM_CPUS, NUM_CPUS)


def _new_cluster(*num_cpus: int) -> Cluster:
    cluster = Cluster(num_cpus)
    cluster.environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(STEP_S)
    return cluster
