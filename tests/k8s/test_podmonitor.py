"""The labels of metrics on Kubernetes."""

from __future__ import annotations

import yaml

from specserve.core.metric_specs import ALL, OF_DRAFTERS
from tests.k8s.manifests import ROOT

OF_OPERATOR = {"namespace", "pod", "container", "job", "endpoint", "instance"}
"""Labels that Prometheus' operator gives to what it scrapes from a pod."""


def test_no_label_of_ours_is_one_of_the_operators() -> None:
    assert OF_OPERATOR.isdisjoint(label for spec in (*ALL, *OF_DRAFTERS) for label in spec.labels)


def test_each_series_keeps_the_namespace_of_its_pod() -> None:
    monitor = yaml.safe_load((ROOT / "k8s/base/podmonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert set(endpoint) == {"port", "interval"}
