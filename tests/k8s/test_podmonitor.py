"""The labels that a real Prometheus gives to metrics, on Kubernetes and without."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import yaml

from deploy.grafana.panels import rows
from tests.integration.cluster import HOST, eventually, free_ports
from tests.integration.prometheus import Prometheus, labels
from tests.k8s.manifests import ROOT

METRICS = b"""\
# TYPE ray_specserve_trie_tokens gauge
ray_specserve_trie_tokens{model="demo",namespace="of-a-tenant"} 3.0
# TYPE ray_serve_application_status gauge
ray_serve_application_status{application="app"} 6.0
"""
POD = {"namespace": "of-the-pod", "pod": "specserve-head", "container": "ray-head"}
"""Labels that Prometheus' operator gives to what it scrapes from a pod."""
(MONITORED,) = yaml.safe_load((ROOT / "k8s/base/podmonitor.yaml").read_text())["spec"][
    "podMetricsEndpoints"
]
(FILE,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]


class Node(BaseHTTPRequestHandler):
    """A node's metrics."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(METRICS)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    """Address of a node."""
    with HTTPServer((HOST, 0), Node) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"{HOST}:{server.server_port}"
        server.shutdown()
        thread.join()


def of_operator(rule: dict[str, Any]) -> dict[str, Any]:
    """A relabeling with Prometheus' own names of the keys."""
    return {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key): rule[key] for key in rule}


@pytest.fixture(scope="module")
def prometheus(node: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A server that scrapes the node twice: as from the file of nodes, and as by the PodMonitor."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed")
    relabelings = [of_operator(rule) for rule in MONITORED["metricRelabelings"]]
    jobs = [
        {"job_name": "file", "static_configs": [{"targets": [node]}]},
        {
            "job_name": "pods",
            "static_configs": [{"targets": [node], "labels": POD}],
            "metric_relabel_configs": relabelings,
        },
    ]
    assert set(FILE) == {"job_name", "file_sd_configs"}  # no relabeling there
    folder = tmp_path_factory.mktemp("prometheus")
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
    (port,) = free_ports(1)
    command = [
        binary,
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={HOST}:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    client = Prometheus(f"http://{HOST}:{port}")
    try:
        eventually(
            lambda: client.is_ready() and len(client.query("ray_specserve_trie_tokens")) == 2,
            lambda: f"both jobs are scraped:\n{(folder / 'log').read_text()}",
            60,
        )
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("job", ["file", "pods"])
def test_the_dashboard_shows_the_namespaces_of_the_draft_memory(
    prometheus: Prometheus, job: str
) -> None:
    (panel,) = (each for each in rows()["Draft memory"] if each.title == "Size by namespace")
    (query,) = panel.queries.values()
    of_job = re.sub(r"\{.*?\}", f'{{job="{job}"}}', query)
    assert f'job="{job}"' in of_job
    assert prometheus.query(of_job) == {labels(model="demo", namespace="of-a-tenant"): 3}


def test_other_metrics_have_the_namespace_of_the_pod(prometheus: Prometheus) -> None:
    (found,) = prometheus.query('ray_serve_application_status{job="pods"}')
    assert dict(found).items() >= {**POD, "application": "app"}.items()


def test_no_label_is_left_of_the_conflict(prometheus: Prometheus) -> None:
    assert prometheus.query('{job="pods", exported_namespace!=""}') == {}
