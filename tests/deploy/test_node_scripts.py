"""Refusals of a node's start scripts, and the ports that they use."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = (ROOT / "deploy/node.env").read_text()


def refusal(script: str, *arguments: str, **environment: str) -> str:
    """The one line that a script ends with."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [f"deploy/{script}.sh", *arguments],
        cwd=ROOT,
        env={"PATH": path, "HOME": "/nonexistent", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{script}.sh: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.strip()


@pytest.mark.parametrize("script", ["head", "worker"])
@pytest.mark.parametrize("arguments", [(), ("--num-cpus", "2")])
def test_without_an_address_they_print_their_usage(script: str, arguments: tuple[str]) -> None:
    assert refusal(script, *arguments).endswith("HEAD_ADDRESS [OPTIONS OF ray start]")


def test_an_unknown_host_is_refused() -> None:
    assert "no.such.host.invalid: no such host" in refusal("worker", "no.such.host.invalid")


def test_the_heads_address_must_be_its_own() -> None:
    said = refusal("head", "127.9.9.9", RAY_AUTH_TOKEN="a token")
    assert said.endswith("127.9.9.9 is not an address of this machine")


@pytest.mark.parametrize("content", [None, ""], ids=["missing", "empty"])
def test_a_token_file_must_contain_a_token(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    assert "no token: set RAY_AUTH_TOKEN" in refusal(
        "worker", "127.0.0.1", RAY_AUTH_TOKEN_PATH=str(file)
    )


def test_a_head_that_does_not_answer_is_reported_in_time(tmp_path: Path) -> None:
    settings = tmp_path / "node.env"
    settings.write_text(f"{SETTINGS}\nHEAD_WAIT_S=1\nGCS_PORT=1\n")
    said = refusal("worker", "127.0.0.1", RAY_AUTH_TOKEN="a token", NODE_ENV_FILE=str(settings))
    assert said.endswith("no head answered at 127.0.0.1:1 within 1 s")


@pytest.mark.parametrize(
    ("script", "setting"),
    [("head", "GCS_PORT"), ("head", "AGENT_HTTP_PORT"), ("worker", "METRICS_PORT")],
)
def test_a_port_in_use_is_refused(script: str, setting: str, tmp_path: Path) -> None:
    settings, ray = tmp_path / "node.env", tmp_path / "ray"
    ray.write_text("#!/bin/sh\n[ $1 = health-check ]\n")  # the worker finds a head
    ray.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        settings.write_text(f"{SETTINGS}\n{setting}={port}\nPORT_WAIT_S=0\n")
        environment = {
            "PATH": os.pathsep.join(
                [str(tmp_path), f"{Path(sys.executable).parent}", "/usr/bin:/bin"]
            ),
            "RAY_AUTH_TOKEN": "a token",
            "NODE_ENV_FILE": str(settings),
        }
        said = refusal(script, "127.0.0.1", **environment)
    assert f": port {port} ({setting}) is in use by " in said


def test_each_port_is_used_once_and_is_not_ephemeral() -> None:
    ports = {name: int(port) for name, port in re.findall(r"^(\w+_PORT)=(\d+)", SETTINGS, re.M)}
    workers = range(ports.pop("MIN_WORKER_PORT"), ports.pop("MAX_WORKER_PORT") + 1)
    replica = "RAY_SERVE_DIRECT_INGRESS_{}_HTTP_PORT"
    replicas = range(ports.pop(replica.format("MIN")), ports.pop(replica.format("MAX")) + 1)
    assert len(set(ports.values())) == len(ports) == 9
    assert not set(ports.values()) & {*workers, *replicas}
    assert not set(workers) & set(replicas)
    assert max(*ports.values(), workers[-1], replicas[-1]) < 32768  # others are ephemeral
