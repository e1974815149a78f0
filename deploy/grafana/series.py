"""The metrics that the dashboard may query, and functions that build the PromQL queries.

specserve's metrics come from ``specserve/core/metric_specs.py``. vLLM's and Ray's are listed here,
and a test looks for them in the sources of both. A query by an unknown label is an error when the
dashboard is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specserve.core.metric_specs import MetricSpec

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Series:
    """A metric that Prometheus scrapes from Ray.

    Attributes:
        name: with Ray's prefix ``ray_``; for a histogram without ``_bucket``.
        kind: Prometheus' type.
        labels: a query may group by these, and by ``instance``, the node, which Prometheus adds. If
            the first one is ``model`` or ``model_name``, it names the model. Each query also groups
            by ``namespace``, which only Kubernetes' pods have.
        only: label matchers that select the wanted series, if the name has others too.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    only: str = ""

    def rate(self, *by: str) -> str:
        """Query for a counter's increase per second, summed by the labels ``by``."""
        assert self.kind == "counter", self
        return f"sum by ({self._listed(by)}) (rate({self.name}{self._chosen()}[$__rate_interval]))"

    def value(self, aggregation: str, *by: str) -> str:
        """Query for a gauge's value, aggregated over the replicas by the labels ``by``."""
        assert self.kind == "gauge", self
        return f"{aggregation} by ({self._listed(by)}) ({self.name}{self._chosen()})"

    def latest(self, aggregation: str, *by: str) -> str:
        """Like ``value``, for a gauge that is set rarely: Ray has no series of it in between."""
        assert self.kind == "gauge", self
        latest = f"last_over_time({self.name}{self._chosen()}[$__rate_interval])"
        return f"{aggregation} by ({self._listed(by)}) ({latest})"

    def quantile(self, quantile: float, *by: str) -> str:
        """Query for a histogram's quantile, between 0 and 1, by the labels ``by``."""
        assert self.kind == "histogram", self
        buckets = f"rate({self.name}_bucket{self._chosen()}[$__rate_interval])"
        return f"histogram_quantile({quantile}, sum by ({self._listed(by)}, le) ({buckets}))"

    def _chosen(self) -> str:
        model = self.labels[0]
        matchers = f'{model}=~"$model"' if model in ("model", "model_name") else self.only
        return f"{{{matchers}}}" if matchers else ""

    def _listed(self, by: tuple[str, ...]) -> str:
        unknown = set(by) - {*self.labels, "instance"}
        assert not unknown, f"{self.name} has no label {unknown}, only {self.labels}"
        return ", ".join(("namespace", *by))


def ours(spec: MetricSpec) -> Series:
    """Returns the series of a metric that the replicas export."""
    return Series(f"ray_{spec.name}", spec.kind, ("model", *spec.labels))


def of_drafters(spec: MetricSpec) -> Series:
    """Returns the series of a metric that the drafters export; it has no label of the model."""
    return Series(f"ray_{spec.name}", spec.kind, spec.labels)


def or_zero(part: str, present: str) -> str:
    """Query for ``part``, with 0 where only ``present`` has a series.

    Ray exports no series of a counter that is still 0, nor of a gauge that was not set since the
    last report. vLLM does not set its gauges while it is idle.
    """
    return f"({part} or 0 * {present})"


def share(part: str, whole: str) -> str:
    """Query for ``part / whole``, with 0 where only ``whole`` has a series."""
    return f"{or_zero(part, whole)} / {whole}"


def _vllm(name: str, kind: Kind, *labels: str) -> Series:
    return Series(f"ray_vllm_{name}", kind, ("model_name", *labels))


GENERATION_TOKENS = _vllm("generation_tokens_total", "counter")
PROMPT_TOKENS = _vllm("prompt_tokens_total", "counter")
REQUESTS_RUNNING = _vllm("num_requests_running", "gauge")
REQUESTS_WAITING = _vllm("num_requests_waiting", "gauge")
REQUESTS_REFUSED = _vllm("admission_rejections_total", "counter", "reason")
FIRST_TOKEN = _vllm("time_to_first_token_seconds", "histogram")
BETWEEN_TOKENS = _vllm("inter_token_latency_seconds", "histogram")
VLLM = (
    GENERATION_TOKENS,
    PROMPT_TOKENS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    REQUESTS_REFUSED,
    FIRST_TOKEN,
    BETWEEN_TOKENS,
)

REPLICAS = Series("ray_serve_deployment_replica_healthy", "gauge", ("application", "deployment"))
PLACEMENT_GROUPS = Series("ray_placement_groups", "gauge", ("State",))
# The head and the nodes both report actors. Only the nodes' series say where an actor runs.
ACTORS = Series(
    "ray_actors",
    "gauge",
    ("Name", "NodeAddress"),
    only='Source="executor", Name=~"ServeReplica:.*|.*RayWorkerProc|.*Drafter|TrieStoreActor"',
)
RAY = (REPLICAS, PLACEMENT_GROUPS, ACTORS)
