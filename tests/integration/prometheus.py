"""A Prometheus server for the tests, with this project's configuration and rules."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.integration.cluster import HOST, Failed, eventually, free_ports

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
SCRAPE_INTERVAL_S = 2  # a busy machine needs nearly 1 s to answer

Labels = frozenset[tuple[str, str]]


def labels(**values: str) -> Labels:
    """The labels that identify a series in a query's result."""
    return frozenset(values.items())


class Prometheus:
    """A client of a Prometheus server.

    Args:
        url: URL of the server.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30)

    def query(self, expr: str, time: float | None = None) -> dict[Labels, float]:
        """Values of an expression by the labels of their series, now or at a given time."""
        at = {} if time is None else {"time": time}
        found = self._get("query", query=expr, **at)["result"]
        return {
            labels(**{k: v for k, v in each["metric"].items() if k != "__name__"}): float(
                each["value"][1]
            )
            for each in found
        }

    def rules(self) -> list[dict[str, Any]]:
        """All rules with their health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def scraped(self) -> set[str]:
        """Addresses that are scraped successfully."""
        targets = self._get("targets", state="active")["activeTargets"]
        return {each["labels"]["instance"] for each in targets if each["health"] == "up"}

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _get(self, what: str, **parameters: Any) -> Any:
        answer = self._http.get(f"/api/v1/{what}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]


def configuration(ray_folder: Path) -> dict[str, Any]:
    """The project's configuration for another Ray folder, with a shorter scrape interval."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    seconds = f"{SCRAPE_INTERVAL_S}s"
    config["global"] = {"scrape_interval": seconds, "evaluation_interval": seconds}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    for scrape in config["scrape_configs"]:
        for discovery in scrape["file_sd_configs"]:
            discovery["files"] = [str(ray_folder / Path(name).name) for name in discovery["files"]]
    return config


@contextmanager
def running_prometheus(ray_folder: Path) -> Iterator[Prometheus]:
    """A server that scrapes the nodes listed in the folder of a cluster's head."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed")
    folder = Path(tempfile.mkdtemp(prefix="prometheus"))
    (port,) = free_ports(1)
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration(ray_folder)))
    options = {
        "config.file": file,
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"{HOST}:{port}",
    }
    command = [binary, *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    prometheus = Prometheus(f"http://{HOST}:{port}")

    def is_ready() -> bool:
        if process.poll() is not None:
            raise Failed(f"Prometheus did not start:\n{(folder / 'log').read_text()}")
        return prometheus.is_ready()

    try:
        eventually(is_ready, "Prometheus", 60)
        yield prometheus
    finally:
        prometheus.close()
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder)
