"""The open ports between nodes, in all places that name them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ray.serve._private import constants

ROOT = Path(__file__).parents[2]
SETTINGS = dict(
    re.findall(r"^(\w+_PORT)=(\d+)", (ROOT / "deploy/node.env").read_text(), flags=re.M)
)
REPLICAS = tuple(
    SETTINGS[f"RAY_SERVE_DIRECT_INGRESS_{bound}_HTTP_PORT"] for bound in ("MIN", "MAX")
)
OWN = [str(constants.RAY_SERVE_HAPROXY_STATS_PORT), str(constants.RAY_SERVE_HAPROXY_METRICS_PORT)]
PROXY = SETTINGS["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"]


def table() -> dict[str, str]:
    """The documented ports and their nodes."""
    page = (ROOT / "docs/operations/two-nodes.md").read_text()
    (rows,) = re.findall(r"^\| TCP port, from .*?\n\n", page, flags=re.M | re.S)
    return dict(re.findall(r"^\| ([\d., ]+?) \| (.*?) \|", rows, flags=re.M))


def test_the_page_names_the_ports_of_the_settings() -> None:
    named = {number for row in table() for number in re.findall(r"\d+", row)}
    inner = {f"{number}" for number in range(6381, 6384)}  # in a documented range
    assert set(SETTINGS.values()) - inner == named - set(OWN)


def test_replicas_listen_on_serves_default_ports() -> None:
    assert f"{constants.RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT}" == REPLICAS[0]
    assert f"{constants.RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT}" == REPLICAS[1]
    assert f"{constants.RAY_SERVE_FALLBACK_PROXY_HTTP_PORT}" == PROXY
    assert table()[" .. ".join(REPLICAS)] == "every node"
    assert table()[PROXY] == "head"


def test_haproxys_statistics_and_metrics_are_local_to_the_head() -> None:
    assert table()[", ".join(OWN)] == "head, loopback only"


@pytest.mark.parametrize("file", ["deploy/node.env", "k8s/base/networkpolicy.yaml"])
def test_each_place_names_haproxys_ports(file: str) -> None:
    text = (ROOT / file).read_text()
    for port in (*REPLICAS, *OWN, PROXY):
        assert re.search(rf"\b{port}\b", text), port


@pytest.mark.parametrize("file", ["deploy/compose.head.yaml", "deploy/compose.worker.yaml"])
def test_compose_names_the_replicas_ports_and_the_file_of_the_others(file: str) -> None:
    text = (ROOT / file).read_text()
    assert " to ".join(REPLICAS) in text
    assert "deploy/node.env names the ports" in text
