"""The compose files, tested without a container."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.manifests import ROOT

FOLDER = ROOT / "deploy"
FILES = {path.name: path.read_text() for path in sorted(FOLDER.glob("compose.*.yaml"))}
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


def required(name: str) -> dict[str, str]:
    return {variable: "/a/value" for variable, needed in variables(name).items() if needed}


def compose(
    name: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """The result of docker-compose for a file in this environment."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    file = folder / name
    # Debian's docker-compose is older than the key for a project's name.
    file.write_text(re.sub(r"^name: .*\n", "", FILES[name], flags=re.M))
    return subprocess.run(
        ["docker-compose", "--project-directory", str(FOLDER), "-f", str(file), "config"],
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
            source = re.sub(r"\$\{.*?\}", "/set", volume).split(":")[0]
            assert source == "/set" or source in volumes or (FOLDER / source).exists(), volume


@every_file
def test_each_service_restarts_and_has_no_extra_rights(name: str) -> None:
    for service in services(name).values():
        assert service["restart"] == "unless-stopped"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service


@pytest.mark.parametrize(("name", "service"), zip(NODES, ("head", "worker"), strict=True))
def test_a_node_is_a_container_that_runs_its_script_with_the_token(name: str, service: str) -> None:
    (node,) = services(name).values()
    assert f"deploy/{service}.sh" in " ".join(node["command"])
    assert (FOLDER / f"{service}.sh").stat().st_mode & 0o111
    assert node["environment"]["RAY_AUTH_TOKEN"] == "${RAY_AUTH_TOKEN:?the token of the cluster}"
    assert node["network_mode"] == "host"
    assert {"shm_size", "healthcheck"} <= set(node)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The programs of the head's container. Each one only records its call."""
    for name in ("deploy/head.sh", "bin/ray", "bin/serve"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        record(tmp_path / name)
    (tmp_path / "deploy/node.env").write_text("GCS_PORT=7\n")
    return tmp_path


def record(program: Path, then: str = "") -> None:
    said = f'echo "{program.name} $*" >> {program.parents[1]}/notes'
    program.write_text(f"#!/bin/sh\n{said}\n{then}\n")
    program.chmod(0o755)


def run_head(image: Path) -> tuple[int, list[str]]:
    """The exit code of the head's command, and what it called."""
    (head,) = services("compose.head.yaml").values()
    environment = {"HEAD_ADDRESS": "a", "NODE_RESOURCES": "{}", "SPECSERVE_CONFIG": "c.yaml"}
    done = subprocess.run(
        [part.replace("$$", "$") for part in head["command"]],
        cwd=image,
        env={"PATH": f"{image}/bin:/usr/bin:/bin", **environment},
        timeout=60,
        check=False,
    )
    return done.returncode, (image / "notes").read_text().splitlines()


def test_the_head_serves_once_ray_answers(image: Path) -> None:
    record(image / "deploy/head.sh", "exec sleep 5")
    record(image / "bin/ray", f"[ $(grep -c ^ray {image}/notes) = 2 ]")  # fails once
    code, notes = run_head(image)
    assert code == 0
    assert sorted(notes[:-1]) == [
        "head.sh a --resources={}",
        *2 * ["ray health-check --address a:7"],
    ]
    assert notes[-1] == "serve run --address a:7 c.yaml"


def test_a_head_that_ends_before_it_answers_ends_the_container(image: Path) -> None:
    record(image / "bin/ray", "exit 1")
    code, notes = run_head(image)
    assert code != 0
    assert not any(each.startswith("serve") for each in notes)


def test_prometheus_finds_the_nodes_and_grafana_finds_prometheus() -> None:
    monitoring = yaml.safe_load(FILES["compose.monitoring.yaml"])
    head = yaml.safe_load(FILES["compose.head.yaml"])
    (shared,) = set(monitoring["volumes"]) & set(head["volumes"])
    name = head["volumes"][shared]["name"]
    assert monitoring["volumes"][shared] == {"name": name, "external": True}
    prometheus, grafana = (monitoring["services"][each] for each in ("prometheus", "grafana"))
    config = yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text())
    (listed,) = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert f"{shared}:{Path(listed).parent}" in head["services"]["head"]["volumes"]
    assert f"{shared}:{Path(listed).parent}:ro" in prometheus["volumes"]
    datasource = FOLDER / "grafana/provisioning/datasources/prometheus.yaml"
    (source,) = yaml.safe_load(datasource.read_text())["datasources"]
    port = source["url"].rpartition(":")[2]
    assert f"--web.listen-address=127.0.0.1:{port}" in prometheus["command"]
    assert prometheus["network_mode"] == grafana["network_mode"] == "host"
