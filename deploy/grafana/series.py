"""The series that the dashboard may ask for, and the queries that can be made of them.

Ours come from their declarations in ``specserve/core/metric_specs.py``; vLLM's and Ray's are named
here, and a test looks for them in the sources of both. A query for a series or a label that nobody
exports is refused when the dashboard is written, not seen as an empty panel later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specserve.core.metric_specs import MetricSpec

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Series:
    """A metric as Prometheus has it from Ray.

    Attributes:
        name: with Ray's prefix ``ray_``; a histogram's without ``_bucket``.
        kind: Prometheus' type.
        labels: what a query may group by. The first one names the model where it is ``model`` or
            ``model_name``; Prometheus itself adds ``instance``, the node.
        only: matchers of the series that count, where there are others of that name.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    only: str = ""

    def rate(self, *by: str) -> str:
        """A counter's increase per second."""
        assert self.kind == "counter", self
        return f"sum by ({self._listed(by)}) (rate({self.name}{self._chosen()}[$__rate_interval]))"

    def value(self, aggregation: str, *by: str) -> str:
        """A gauge's value, over the replicas."""
        assert self.kind == "gauge", self
        return f"{aggregation} by ({self._listed(by)}) ({self.name}{self._chosen()})"

    def latest(self, aggregation: str, *by: str) -> str:
        """The same of a gauge that is set now and then: between, Ray has no series of it."""
        assert self.kind == "gauge", self
        latest = f"last_over_time({self.name}{self._chosen()}[$__rate_interval])"
        return f"{aggregation} by ({self._listed(by)}) ({latest})"

    def quantile(self, quantile: float, *by: str) -> str:
        """A histogram's quantile."""
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
        return ", ".join(by)


def ours(spec: MetricSpec) -> Series:
    """A metric of this project."""
    return Series(f"ray_{spec.name}", spec.kind, ("model", *spec.labels))


def of_drafters(spec: MetricSpec) -> Series:
    """A metric that the drafters export themselves, whatever models they draft for."""
    return Series(f"ray_{spec.name}", spec.kind, spec.labels)


def or_zero(part: str, present: str) -> str:
    """The part, and 0 where only ``present`` has a series.

    Ray has no series of a counter that is still 0, nor of a gauge that was not set since its last
    report, as vLLM's are not while there is nothing to do.
    """
    return f"({part} or 0 * {present})"


def share(part: str, whole: str) -> str:
    """Their quotient."""
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
# Of what is told twice, the nodes' word: the head's does not say where an actor is.
ACTORS = Series(
    "ray_actors",
    "gauge",
    ("Name", "NodeAddress"),
    only='Source="executor", Name=~"ServeReplica:.*|.*RayWorkerProc|.*Drafter|TrieStoreActor"',
)
RAY = (REPLICAS, PLACEMENT_GROUPS, ACTORS)
