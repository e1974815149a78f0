from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from tests.integration.api import Api
from tests.integration.cluster import HOST, Deployment

pytestmark = pytest.mark.timeout(900)

PROMPT = "for number in numbers:\n    total += number\n" * 8
ACCEPTANCE = {
    "specserve_drafts_total": "drafts",
    "specserve_draft_tokens_total": "draft_tokens",
    "specserve_accepted_tokens_total": "accepted_tokens",
    "specserve_accepted_length_count": "drafts",
}


def series(url: str, prefix: str) -> dict[tuple[str, str], float]:
    """The project's series of a page: (name without ``prefix``, draft position) to value."""
    found: dict[tuple[str, str], float] = {}
    for family in families(httpx.get(url, timeout=30).text):
        for sample in family.samples:
            if sample.name.startswith(f"{prefix}specserve_") and "le" not in sample.labels:
                assert sample.labels["model"] == "demo"
                if prefix and sample.labels.get("source") != "ngram":
                    continue  # of an application before this one: Ray keeps them for a while
                assert sample.labels["source"] == "ngram"
                name = sample.name.removeprefix(prefix)
                found[name, sample.labels.get("position", "")] = sample.value
    return found


def expected(api: Api) -> dict[tuple[str, str], float]:
    """The same from ``GET /v1/speculation``, as far as it tells it."""
    answer = api.speculation()
    acceptance = answer["acceptance"]["ngram"]
    values = {(name, ""): float(acceptance[field]) for name, field in ACCEPTANCE.items()}
    for which in ("drafted", "accepted"):
        for position, count in enumerate(acceptance[f"{which}_at_position"], start=1):
            values[f"specserve_{which}_at_position_total", str(position)] = float(count)
    values["specserve_drafter_up", ""] = float(answer["sources"][0]["up"])
    return values


def traffic(api: Api) -> dict[tuple[str, str], float]:
    """Makes drafts, and returns the series that there should be."""
    api.complete(prompt=PROMPT, max_tokens=64)
    values = expected(api)
    assert values["specserve_drafter_up", ""] == 1.0
    assert values["specserve_accepted_tokens_total", ""] > 0
    return values


def test_the_replicas_own_metrics_agree_with_the_speculation_route(api: Api) -> None:
    values = traffic(api)
    shown = series(f"{api.base_url}/metrics", "")
    assert {key: shown[key] for key in values} == values
    # Ray tells a histogram's sum only nearly, so this is the replica's own alone.
    accepted = values["specserve_accepted_tokens_total", ""]
    assert shown["specserve_accepted_length_sum", ""] == accepted
    assert shown["specserve_draft_latency_seconds_count", ""] > 0
    assert shown["specserve_drafter_errors_total", ""] == 0


def test_rays_metrics_agree_with_the_speculation_route(api: Api, app: Deployment) -> None:
    # A counter that is still 0 has no series in Ray.
    values = {key: value for key, value in traffic(api).items() if value}

    shown: dict[tuple[str, str], float] = {}

    def exported() -> bool:
        for port in app.cluster.metrics_ports:
            shown.update(series(f"http://{HOST}:{port}/metrics", "ray_"))
        return {key: shown.get(key) for key in values} == values

    app.eventually(exported, lambda: f"Ray exports {values}; it exports {shown}", timeout_s=60)


def test_vllms_own_metrics_are_the_replicas_and_rays(api: Api, app: Deployment) -> None:
    api.complete(prompt=PROMPT, max_tokens=8)
    assert "\nvllm:generation_tokens_total{" in api.http.get("/metrics").text

    def exported() -> bool:
        pages = [httpx.get(f"http://{HOST}:{port}/metrics") for port in app.cluster.metrics_ports]
        return any("ray_vllm_generation_tokens_total" in page.text for page in pages)

    app.eventually(exported, "Ray exports vLLM's metrics", timeout_s=60)
