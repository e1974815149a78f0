"""The alert rules, which name metrics by strings that nothing else checks."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private import application_state
from ray.serve.schema import ApplicationStatus

from specserve.core.metric_specs import ALL
from tests.k8s.manifests import ROOT

RULES: dict[str, Any] = yaml.safe_load(
    (ROOT / "deploy/prometheus/specserve.rules.yaml").read_text()
)
ALL_RULES: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in ALL_RULES if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in ALL_RULES if "record" in rule}
LABELS = {f"ray_{spec.name}": {"model", *spec.labels} for spec in ALL}
VLLM_LABELS = {"ray_vllm_admission_rejections_total": {"model_name", "reason"}}
SERVE_LABELS = {
    "ray_serve_application_status": {"application"},
    "ray_serve_deployment_replica_healthy": {"application", "deployment", "replica"},
}

every_alert = pytest.mark.parametrize("alert", ALERTS)


def written_out(expr: str) -> str:
    """A rule's expression, with the recorded series in it written out."""
    named = re.sub(r"\w+(:\w+)+", lambda match: f"({RECORDED[match[0]]})", expr)
    return named if named == expr else written_out(named)


def metrics(alert: str) -> list[str]:
    return re.findall(r"\bray_\w+", written_out(ALERTS[alert]["expr"]))


def test_there_is_an_alert_for_each_failure() -> None:
    assert set(ALERTS) == {
        "SpecserveNotRunning",
        "SpecserveDegraded",
        "SpecserveAcceptanceCollapsed",
        "SpecserveDrafterDown",
        "SpecserveReplicationLag",
        "SpecserveQueueFull",
        "SpecserveTrieAtItsBudget",
    }


def operands(alert: str) -> list[str]:
    """The operands of `and` in an alert's expression. Its result has the first one's labels."""
    return re.split(r"\band on \(.*?\)", written_out(ALERTS[alert]["expr"]))


@every_alert
def test_an_alert_has_all_fields(alert: str) -> None:
    rule = ALERTS[alert]
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description"}


@every_alert
def test_an_alert_uses_existing_metrics_and_labels(alert: str) -> None:
    known = LABELS | VLLM_LABELS | SERVE_LABELS
    names = metrics(alert)
    assert names
    assert set(names) <= set(known)
    for operand in operands(alert):
        of_operand = [name for name in names if name in operand]
        for listed in re.findall(r"\bby \((.*?)\)", operand):
            of_pod, *labels = listed.split(", ")
            assert of_pod == "namespace"
            assert all(set(labels) <= known[name] for name in of_operand)


@every_alert
def test_an_alerts_text_uses_labels_of_its_result(alert: str) -> None:
    rule = ALERTS[alert]
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    (kept,) = set(re.findall(r"\bby \((.*?)\)", operands(alert)[0]))
    assert used <= set(kept.split(", "))


def test_vllm_counts_rejections_by_model_and_reason() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    loggers = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    declared = re.search(r'"vllm:admission_rejections",.*?labelnames=\[(.*?)\]', loggers, re.DOTALL)
    assert declared is not None
    assert declared[1] == '"model_name", "reason"'


def test_serve_reports_6_for_a_running_application_and_less_for_any_other() -> None:
    state = Path(application_state.__file__).read_text()
    declared = re.search(r'Gauge\(\s*"serve_application_status",.*?tag_keys=\((.*?)\)', state, re.S)
    assert declared is not None
    assert declared[1] == '"application",'
    below = re.search(r"< (\d+)$", ALERTS["SpecserveNotRunning"]["expr"], re.M)
    assert below is not None
    found = {status for status in ApplicationStatus if status.to_numeric() >= int(below[1])}
    assert found == {ApplicationStatus.RUNNING}


def test_the_page_lists_each_alert() -> None:
    page = (ROOT / "docs/operations/monitoring.md").read_text()
    (listed,) = re.findall(r"^It evaluates the alerts.*?\n\n(.*?)\n\n", page, re.M | re.S)
    assert re.findall(r"^\| `(\w+)`", listed, re.M) == list(ALERTS)


def test_the_operators_rules_are_the_same() -> None:
    rule = yaml.safe_load((ROOT / "k8s/base/prometheusrule.yaml").read_text())
    assert rule["spec"] == RULES
