from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from functools import partial

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from tests.integration.api import Api, fresh
from tests.integration.cluster import HOST, Cluster, Deployment, Failed

pytestmark = pytest.mark.timeout(900)

PROMPT = "for number in numbers:\n    total += number\n" * 8
ACCEPTANCE = {
    "specserve_drafts_total": "drafts",
    "specserve_draft_tokens_total": "draft_tokens",
    "specserve_accepted_tokens_total": "accepted_tokens",
    "specserve_accepted_length_count": "drafts",
}


Series = dict[tuple[str, str], float]
"""(name, draft position) to value."""
Labels = frozenset[tuple[str, str]]
"""The other labels of a process's series."""


def series(page: str, prefix: str) -> dict[Labels, Series]:
    """The project's series of a page for each process, with names without ``prefix``."""
    found: dict[Labels, Series] = defaultdict(dict)
    for family in families(page):
        for sample in family.samples:
            if sample.name.startswith(f"{prefix}specserve_") and "le" not in sample.labels:
                if "drafter" in sample.labels:
                    continue  # from an earlier application
                assert sample.labels["model"] == "demo"
                labels = dict(sample.labels)
                position = labels.pop("position", "")
                of_process = found[frozenset(labels.items())]
                of_process[sample.name.removeprefix(prefix), position] = sample.value
    return found


def increase(later: Series, earlier: Series) -> Series:
    """The series that have grown, and by how much."""
    grown = {key: value - earlier.get(key, 0.0) for key, value in later.items()}
    return {key: value for key, value in grown.items() if value}


def exported_by_ray(cluster: Cluster) -> list[str]:
    """The pages of metrics that Ray exports; empty if a node does not answer in time."""
    urls = [f"http://{HOST}:{port}/metrics" for port in cluster.metrics_ports]
    try:
        return [httpx.get(url, timeout=30).text for url in urls]
    except httpx.HTTPError:
        return []


def rays_series(cluster: Cluster) -> dict[Labels, Series]:
    """The project's series that Ray exports, for each process."""
    found: dict[Labels, Series] = {}
    for page in exported_by_ray(cluster):
        found |= series(page, "ray_")
    return found


def expected(api: Api) -> Series:
    """The series that ``GET /v1/speculation`` has values for."""
    answer = api.speculation()
    acceptance = answer["acceptance"]["ngram"]
    values = {(name, ""): float(acceptance[field]) for name, field in ACCEPTANCE.items()}
    for which in ("drafted", "accepted"):
        for position, count in enumerate(acceptance[f"{which}_at_position"], start=1):
            values[f"specserve_{which}_at_position_total", str(position)] = float(count)
    values["specserve_drafter_up", ""] = float(answer["sources"][0]["up"])
    return values


def traffic(api: Api) -> Series:
    """Causes drafts, and returns the expected series."""
    api.complete(prompt=PROMPT, max_tokens=64)
    values = expected(api)
    assert values["specserve_drafter_up", ""] == 1.0
    assert values["specserve_accepted_tokens_total", ""] > 0
    return values


def test_the_replicas_own_metrics_agree_with_the_speculation_route(api: Api) -> None:
    values = traffic(api)
    sources = series(fresh(api.http, "/metrics").text, "").values()
    (shown,) = (each for each in sources if {key: each.get(key) for key in values} == values)
    # Only the replica's own metrics have a histogram's exact sum; Ray's is approximate.
    accepted = values["specserve_accepted_tokens_total", ""]
    assert shown["specserve_accepted_length_sum", ""] == accepted
    assert shown["specserve_draft_latency_seconds_count", ""] > 0
    assert shown["specserve_drafter_errors_total", ""] == 0


def test_rays_metrics_agree_with_the_speculation_route(api: Api, shared: Deployment) -> None:
    before: Series = {}
    base: dict[Labels, Series] = {}

    def are_exported(wanted: Series) -> bool:
        # For a while Ray still exports the series of earlier applications.
        now = rays_series(shared.cluster)
        found = (increase(each, base.get(process, {})) for process, each in now.items())
        return any(wanted.items() <= each.items() for each in found)

    for _ in range(3):  # on a busy machine Ray drops increments, so that only later ones agree
        wanted = increase(traffic(api), before)
        assert wanted, "no drafts: the comparison shows nothing"
        with suppress(Failed):
            shared.eventually(partial(are_exported, wanted), "the same increase", 30)
            return
        before, base = expected(api), rays_series(shared.cluster)
    raise Failed(f"Ray does not export {wanted}; it exports {base}")


def test_the_replica_and_ray_export_vllms_metrics(api: Api, shared: Deployment) -> None:
    api.complete(prompt=PROMPT, max_tokens=8)
    text = fresh(api.http, "/metrics").text
    assert "\nvllm:generation_tokens_total{" in text
    assert "\nhttp_requests_total{" in text

    def exported() -> bool:
        pages = exported_by_ray(shared.cluster)
        return any("ray_vllm_generation_tokens_total" in page for page in pages)

    shared.eventually(exported, "Ray exports vLLM's metrics", timeout_s=60)
