"""The dashboard queries only exported metrics, and its file is the generator's output."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.generate import DASHBOARD, text
from deploy.grafana.panels import rows
from deploy.grafana.series import RAY, VLLM, Series, of_drafters, ours
from specserve.core.metric_specs import ALL, DRAFTER_UP, DRAFTS, OF_DRAFTERS, MetricSpec
from tests.deploy.promtool import promtool
from tests.k8s.manifests import OVERLAYS, of_kind

GRAFANA = DASHBOARD.parents[1]
PANELS: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]


def exported(series: Series) -> str:
    """The name of a series in a query."""
    return series.name + ("_bucket" if series.kind == "histogram" else "")


def without_variables(query: str) -> str:
    """The query in PromQL, without Grafana's variables."""
    return query.replace("$__rate_interval", "1m").replace("$model", ".*")


def query_of(title: str) -> str:
    """A panel's first query."""
    (panel,) = (panel for panel in PANELS if panel["title"] == title)
    return without_variables(panel["targets"][0]["expr"])


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def source(package: str, *paths: str) -> str:
    """Text of an installed package's files."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return "".join((Path(spec.origin).parent / path).read_text() for path in paths)


def test_the_file_is_the_generators_output() -> None:
    assert DASHBOARD.read_text() == text(), "run: python -m deploy.grafana.generate"


def test_each_series_of_a_panel_is_exported() -> None:
    named = {name for query in QUERIES for name in re.findall(r"\bray_\w+", query)}
    own = (*map(ours, ALL), *map(of_drafters, OF_DRAFTERS))
    assert named <= {exported(series) for series in (*own, *VLLM, *RAY)}


@pytest.mark.parametrize("spec", [*ALL, *OF_DRAFTERS], ids=lambda spec: spec.name)
def test_each_declared_metric_has_a_panel(spec: MetricSpec) -> None:
    name = exported(of_drafters(spec) if spec in OF_DRAFTERS else ours(spec))
    assert any(re.search(rf"\b{name}\b", query) for query in QUERIES)


@pytest.mark.parametrize("series", VLLM, ids=lambda series: series.name)
def test_a_series_of_vllm_is_in_its_source(series: Series) -> None:
    # Ray adds the _total of a counter.
    name = series.name.removeprefix("ray_vllm_").removesuffix("_total")
    loggers = source("vllm", "v1/metrics/loggers.py")
    found = re.search(
        rf'self\._{series.kind}_cls\(\s*name="vllm:{name}",.*?labelnames=(.*?),?\n',
        loggers,
        re.DOTALL,
    )
    assert found is not None
    declared = found[1].replace("labelnames", '"model_name", "engine"')
    assert set(series.labels) <= set(re.findall(r'"(\w+)"', declared))


@pytest.mark.parametrize("series", RAY, ids=lambda series: series.name)
def test_a_series_of_ray_is_in_rays_own_dashboards(series: Series) -> None:
    folder = "dashboard/modules/metrics/dashboards"
    panels = source(
        "ray", f"{folder}/default_dashboard_panels.py", f"{folder}/serve_dashboard_panels.py"
    )
    queries = " ".join(re.findall(rf"expr=['\"].*?\b{series.name}\b.*", panels))
    assert set(series.labels) <= set(re.findall(r"\w+", queries))


def test_a_query_for_an_unknown_label_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"drafts_total has no label .'position'."):
        ours(DRAFTS).rate("model", "position")


def test_a_rate_of_a_gauge_is_refused() -> None:
    with pytest.raises(AssertionError, match="gauge"):
        ours(DRAFTER_UP).rate("model")


def test_a_legend_names_labels_that_its_query_keeps() -> None:
    for panel in (panel for panels in rows().values() for panel in panels):
        for legend, query in panel.queries.items():
            kept = re.findall(r"\bby \((.*?)\)", query)
            named = set(re.findall(r"{{(\w+)}}", legend))
            assert any(named <= set(listed.split(", ")) for listed in kept), (legend, query)


def test_no_panel_covers_another() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_each_query_is_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{index}", "expr": without_variables(query)}
        for index, query in enumerate(QUERIES)
    ]
    path = tmp_path / "queries.rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", path)


def test_the_dashboard_is_provisioned_from_its_folder() -> None:
    (provider,) = read(GRAFANA / "provisioning/dashboards/specserve.yaml")["providers"]
    assert Path(provider["options"]["path"]).name == DASHBOARD.parent.name
    (datasource,) = read(GRAFANA / "provisioning/datasources/prometheus.yaml")["datasources"]
    prometheus = read(GRAFANA.parent / "prometheus/prometheus.yml")
    assert datasource["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_grafanas_sidecar_on_kubernetes_finds_the_dashboard(overlay: str) -> None:
    maps = of_kind(overlay, "ConfigMap")
    (found,) = (
        each for each in maps if each["metadata"].get("labels") == {"grafana_dashboard": "1"}
    )
    assert found["data"] == {DASHBOARD.name: DASHBOARD.read_text()}


def test_the_queries_of_acceptance_and_hit_rate_are_right(tmp_path: Path) -> None:
    # A minute has 60 steps. In 45, trie drafts 2 tokens, and 30 tokens are accepted. In 15, mtp
    # drafts a token, and none is accepted: Ray has no series of its accepted tokens.
    label = 'model="r1", source="{}"'
    series = {
        'ray_vllm_generation_tokens_total{model_name="r1", engine="0"}': 90,
        f"ray_specserve_drafts_total{{{label.format('trie')}}}": 45,
        f"ray_specserve_draft_tokens_total{{{label.format('trie')}}}": 90,
        f"ray_specserve_accepted_tokens_total{{{label.format('trie')}}}": 30,
        f"ray_specserve_drafts_total{{{label.format('mtp')}}}": 15,
        f"ray_specserve_draft_tokens_total{{{label.format('mtp')}}}": 15,
    }
    expected = {
        "Acceptance rate by source": {"trie": 1 / 3, "mtp": 0},
        "Accepted length": {"trie": 2 / 3, "mtp": 0},
        "Hit rate": {"trie": 0.75, "mtp": 0.25},
    }
    case = {
        "interval": "15s",
        "input_series": [
            {"series": name, "values": f"0+{a_minute / 4}x40"} for name, a_minute in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": f"round({query_of(title)}, 0.0001)",
                "eval_time": "5m",
                "exp_samples": [
                    {"labels": f"{{{label.format(name)}}}", "value": round(value, 4)}
                    for name, value in values.items()
                ],
            }
            for title, values in expected.items()
        ],
    }
    path = tmp_path / "queries.test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    promtool("test", "rules", path)
