"""Prometheus' configuration and alerts, checked by Prometheus' own program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

from tests.deploy.promtool import promtool

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


RULES = [rule for group in read("specserve.rules.yaml")["groups"] for rule in group["rules"]]
TESTS = read("specserve.rules.test.yaml")["tests"]


def names(kind: str) -> list[str]:
    """Names of the alerts, or of the recorded series."""
    return [rule[kind] for rule in RULES if kind in rule]


def test_the_configuration_is_valid() -> None:
    promtool("check", "config", FOLDER / "prometheus.yml")


def test_the_nodes_come_from_the_file_that_ray_writes() -> None:
    (scrape,) = read("prometheus.yml")["scrape_configs"]
    (discovery,) = scrape["file_sd_configs"]
    (file,) = discovery["files"]
    assert file == f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"


def test_alerts_fire_only_when_they_should() -> None:
    promtool("test", "rules", FOLDER / "specserve.rules.test.yaml")


def test_each_alert_is_tested_firing_and_silent() -> None:
    tested = [
        (each["alertname"], bool(each["exp_alerts"]))
        for test in TESTS
        for each in test["alert_rule_test"]
    ]
    assert set(tested) == {(rule, fires) for rule in names("alert") for fires in (True, False)}


def test_each_recorded_series_is_tested_and_used() -> None:
    tested = str([test.get("promql_expr_test") for test in TESTS])
    used = str([rule["expr"] for rule in RULES])
    for name in names("record"):
        assert name in tested
        assert name in used
