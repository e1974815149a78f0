"""The compose files, tested without a container."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ray.serve.schema import ApplicationStatus

from tests.integration.cluster import eventually, heed_interrupts
from tests.k8s.manifests import ROOT

FOLDER = ROOT / "deploy"
TOKEN = "a token"
FILES = {path.name: path.read_text() for path in sorted(FOLDER.glob("compose.*.yaml"))}
RDMA = FILES.pop("compose.rdma.yaml")
"""An addition to a file of ``NODES``."""
NODES = ("compose.head.yaml", "compose.worker.yaml")

every_file = pytest.mark.parametrize("name", FILES)


def services(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(FILES[name])["services"]
    return found


def variables(name: str) -> dict[str, bool]:
    """Variables of a file, and whether each one is required."""
    content = re.sub(r"^#.*\n", "", FILES[name], flags=re.M)
    found: dict[str, bool] = {}
    for variable, operator in re.findall(r"\$\{(\w+)(:[?-]|\})", content):
        found[variable] = found.get(variable, False) or operator == ":?"
    return found


def test_there_is_a_file_for_head_workers_and_monitoring() -> None:
    assert set(FILES) == {*NODES, "compose.monitoring.yaml"}


@every_file
def test_the_header_lists_all_variables_and_the_required_ones(name: str) -> None:
    listed = re.findall(r"^#   ([A-Z_]+) +(required:)?", FILES[name], flags=re.M)
    assert {variable: bool(required) for variable, required in listed} == variables(name)


@every_file
def test_docker_compose_accepts_a_file(name: str, tmp_path: Path) -> None:
    done = compose(name, tmp_path, required(name))
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(services(name))
    done = compose(name, tmp_path, {})
    assert done.returncode != 0
    assert "Missing mandatory value" in done.stderr


@pytest.mark.parametrize("name", NODES)
def test_the_variables_of_a_keys_file_reach_the_container(name: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("TEAM_A_KEY=sk-a\nTEAM_B_KEY=sk-b\n")
    done = compose(name, tmp_path, {**required(name), "SPECSERVE_KEYS": str(keys)})
    assert done.returncode == 0, done.stderr
    (node,) = yaml.safe_load(done.stdout)["services"].values()
    assert {"TEAM_A_KEY": "sk-a", "TEAM_B_KEY": "sk-b"}.items() <= node["environment"].items()
    assert node["environment"]["RAY_AUTH_TOKEN"] == "/a/value"


@pytest.mark.parametrize("name", NODES)
def test_no_file_contains_a_key(name: str) -> None:
    (node,) = services(name).values()
    assert node["env_file"] == ["${SPECSERVE_KEYS:-no_keys.env}"]
    assert not [each for each in node["environment"] if each.endswith("_KEY")]
    lines = (FOLDER / "no_keys.env").read_text().splitlines()
    assert all(line.startswith("#") for line in lines)


@pytest.mark.parametrize("name", NODES)
def test_rdma_adds_the_adapters_to_a_node_and_requires_one(name: str, tmp_path: Path) -> None:
    addition = tmp_path / "rdma.yaml"
    addition.write_text(RDMA)
    alone, together = (
        compose(name, tmp_path, required(name), *additions) for additions in ((), (addition,))
    )
    assert together.returncode == 0, together.stderr
    expected = yaml.safe_load(alone.stdout)
    (node,) = expected["services"].values()
    node["devices"] = ["/dev/infiniband:/dev/infiniband"]
    node["environment"]["NCCL_NET"] = "IB"
    assert yaml.safe_load(together.stdout) == expected
    # The settings of the node's file, not those of the container, switch InfiniBand on.
    assert "NCCL_IB_DISABLE=0 in deploy/node.env" in RDMA
    assert re.search("^NCCL_IB_DISABLE=", (FOLDER / "node.env").read_text(), re.M)


def required(name: str) -> dict[str, str]:
    return {variable: "/a/value" for variable, needed in variables(name).items() if needed}


def compose(
    name: str, folder: Path, environment: dict[str, str], *additions: Path
) -> subprocess.CompletedProcess[str]:
    """The result of docker-compose for a file and additions to it, in this environment."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    file = folder / name
    # Debian's docker-compose is older than these keys.
    file.write_text(re.sub(r"^(name: | +bind: ).*\n", "", FILES[name], flags=re.M))
    files = [option for path in (file, *additions) for option in ("-f", str(path))]
    return subprocess.run(
        ["docker-compose", "--project-directory", str(FOLDER), *files, "config"],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@every_file
def test_mounted_files_exist(name: str) -> None:
    volumes = yaml.safe_load(FILES[name]).get("volumes", {})
    for service in services(name).values():
        for volume in service.get("volumes", []):
            mounted = volume["source"] if isinstance(volume, dict) else volume
            source = re.sub(r"\$\{.*?\}", "/set", mounted).split(":")[0]
            assert source == "/set" or source in volumes or (FOLDER / source).exists(), volume


@every_file
def test_each_service_restarts_and_has_no_extra_rights(name: str) -> None:
    for service in services(name).values():
        assert service["restart"] == "unless-stopped"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service


@pytest.mark.parametrize(("name", "script"), zip(NODES, ("serve.sh", "worker.sh"), strict=True))
def test_a_node_is_a_container_that_runs_its_script_with_the_token(name: str, script: str) -> None:
    (node,) = services(name).values()
    assert node["command"][0] == f"deploy/{script}"
    assert (FOLDER / script).stat().st_mode & 0o111
    assert node["environment"]["RAY_AUTH_TOKEN"] == "${RAY_AUTH_TOKEN:?the token of the cluster}"
    assert node["network_mode"] == "host"
    assert {"shm_size", "healthcheck"} <= set(node)


def test_the_head_serves_a_file_of_the_machine() -> None:
    (head,) = services("compose.head.yaml").values()
    (mounted,) = (each for each in head["volumes"] if isinstance(each, dict))
    assert mounted["source"].startswith("${SPECSERVE_CONFIG:?")
    assert mounted["target"] in head["command"]
    # A wrong path is an error. Otherwise Docker would make an empty folder of that name.
    assert mounted["read_only"]
    assert not mounted["bind"]["create_host_path"]


def test_the_files_in_the_image_include_those_that_the_head_runs() -> None:
    (head,) = services("compose.head.yaml").values()
    kept = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    ran = [each for each in (*head["command"], *head["healthcheck"]["test"]) if "deploy/" in each]
    assert len(ran) == 2
    assert {f"!{each}" for each in (*ran, "deploy/head.sh")} <= set(kept)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """The programs of the head's container. Most of them only record their call.

    None of them is left running, even if a test fails.
    """
    for name in ("deploy/head.sh", "bin/ray", "bin/serve", "bin/specserve"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        record(tmp_path / name)
    record(tmp_path / "deploy/head.sh", "exec sleep 60")
    shutil.copy(FOLDER / "serve.sh", tmp_path / "deploy")
    (tmp_path / "deploy/node.env").write_text("GCS_PORT=7\n")
    yield tmp_path
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if Path(process.cwd()) == tmp_path:
                process.kill()


def record(program: Path, then: str = "") -> None:
    said = f'echo "{program.name} $*" >> {program.parents[1]}/notes'
    program.write_text(f"#!/bin/sh\n{said}\n{then}\n")
    program.chmod(0o755)


def notes(image: Path) -> list[str]:
    """What was called, in order."""
    file = image / "notes"
    return file.read_text().splitlines() if file.exists() else []


def start_head(image: Path) -> subprocess.Popen[bytes]:
    """The head's command, in its container."""
    return subprocess.Popen(
        ["deploy/serve.sh", "a", "c.yaml", "--resources={}"],
        cwd=image,
        env={"PATH": f"{image}/bin:/usr/bin:/bin"},
        preexec_fn=heed_interrupts,  # a shell cannot trap a signal that it ignored from the start
    )


def test_the_head_serves_once_ray_answers(image: Path) -> None:
    record(image / "bin/ray", f"[ $(grep -c ^ray {image}/notes) = 2 ]")  # fails once
    assert start_head(image).wait(60) == 0
    *before, served, _ = notes(image)
    assert sorted(before) == [
        "head.sh a --resources={}",
        *2 * ["ray health-check --address a:7"],
    ]
    assert served == "serve run --address a:7 c.yaml"


def test_a_head_that_ends_before_it_answers_ends_the_container(image: Path) -> None:
    record(image / "deploy/head.sh")
    record(image / "bin/ray", "exit 1")
    assert start_head(image).wait(60) != 0
    assert not any(each.startswith("serve") for each in notes(image))


def test_an_application_that_ends_ends_the_container(image: Path) -> None:
    record(image / "bin/serve", "exit 3")
    record(image / "bin/specserve", "exit 2")  # there is no draft memory
    assert start_head(image).wait(60) == 3


def test_a_stop_before_ray_answers_ends_the_node(image: Path) -> None:
    ended = f"echo head.sh ended >> {image}/notes"
    runs = f"echo runs >> {image}/notes; while :; do sleep 0.1; done"
    record(image / "deploy/head.sh", f"trap '{ended}; exit' TERM\n{runs}")
    record(image / "bin/ray", "exit 1")
    head = start_head(image)
    eventually(lambda: "runs" in notes(image), "the head runs", 60)
    head.send_signal(signal.SIGINT)
    assert head.wait(60) == 1
    assert notes(image)[-1] == "head.sh ended"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_the_application_then_writes_the_snapshot_then_ends_the_node(
    image: Path, how: signal.Signals
) -> None:
    noted = f"echo {{}} >> {image}/notes"
    for name, ends_by in (("bin/serve", "INT"), ("deploy/head.sh", "TERM")):
        program = image / name
        ended = noted.format(f"{program.name} ended")
        # Like `serve run` and `ray start`, it takes a while to end.
        record(program, f"trap 'sleep 0.3; {ended}; exit' {ends_by}\nwhile :; do sleep 0.1; done")
    head = start_head(image)
    eventually(lambda: "serve run --address a:7 c.yaml" in notes(image), "it serves", 60)
    head.send_signal(how)
    assert head.wait(60) == 0
    assert notes(image)[-3:] == [
        "serve ended",
        "specserve trie snapshot --address a:7",
        "head.sh ended",
    ]


class Dashboard(BaseHTTPRequestHandler):
    """Ray's dashboard with one application of the status ``status``."""

    status = ""

    def do_GET(self) -> None:
        right = self.headers["Authorization"] == f"Bearer {TOKEN}"
        self.send_response(200 if right and self.path == "/api/serve/applications/" else 403)
        self.end_headers()
        applications = {"app": {"status": self.status, "message": "why"}} if self.status else {}
        self.wfile.write(json.dumps({"applications": applications}).encode())

    def log_message(self, *_: object) -> None:
        pass


def health(address: str) -> subprocess.CompletedProcess[str]:
    (head,) = services("compose.head.yaml").values()
    _, python, script = head["healthcheck"]["test"]
    assert python == "python"
    return subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env={"RAY_AUTH_TOKEN": TOKEN, "RAY_DASHBOARD_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("status", "code"),
    [("", 0), ("DEPLOYING", 0), ("RUNNING", 0), ("UNHEALTHY", 0), ("DEPLOY_FAILED", 1)],
)
def test_a_head_is_unhealthy_once_serve_has_given_up(status: str, code: int) -> None:
    assert status in {"", *ApplicationStatus}
    handler = type("Answering", (Dashboard,), {"status": status})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        done = health(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()
    assert done.returncode == code, done.stderr
    assert done.stderr == ("app: DEPLOY_FAILED: why\n" if code else "")


def test_a_head_that_does_not_answer_is_unhealthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert health(f"http://127.0.0.1:{port}").returncode != 0


def test_prometheus_finds_the_nodes_and_grafana_finds_prometheus() -> None:
    monitoring = yaml.safe_load(FILES["compose.monitoring.yaml"])
    head = yaml.safe_load(FILES["compose.head.yaml"])
    (shared,) = set(monitoring["volumes"]) & set(head["volumes"])
    name = head["volumes"][shared]["name"]
    assert monitoring["volumes"][shared] == {"name": name, "external": True}
    prometheus, grafana = (monitoring["services"][each] for each in ("prometheus", "grafana"))
    config = yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text())
    (listed,) = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert f"{shared}:{Path(listed).parent}" in head["services"]["node"]["volumes"]
    assert f"{shared}:{Path(listed).parent}:ro" in prometheus["volumes"]
    datasource = FOLDER / "grafana/provisioning/datasources/prometheus.yaml"
    (source,) = yaml.safe_load(datasource.read_text())["datasources"]
    port = source["url"].rpartition(":")[2]
    assert f"--web.listen-address=127.0.0.1:{port}" in prometheus["command"]
    assert prometheus["network_mode"] == grafana["network_mode"] == "host"
