"""Ray's HAProxy, started by `deploy/haproxy`, with Serve's own code as its parent."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psutil
import pytest

from specserve.serve.daemons import is_alive
from specserve.serve.haproxy import closed, connection_limit
from tests.integration.cluster import HAPROXY, HOST, eventually, free_ports, kill

pytestmark = pytest.mark.skipif(not HAPROXY.exists(), reason="Ray brings HAProxy for Linux only")

ROOT = Path(__file__).parents[2]
GONE_S = 15.0


class Parent:
    """Serve's manager of HAProxy in a process of its own."""

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        replica_port: int = 0,
        max_files: int | None = None,
        host: str = HOST,
    ) -> None:
        free, nobody, self.stats_port, self.metrics_port = free_ports(4)
        self.port = port or free
        self.folder = folder
        arguments = (folder, host, self.port, replica_port or nobody)

        def limit_files() -> None:
            if max_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))

        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.serve.haproxy_parent", *map(str, arguments)],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                    "RAY_SERVE_HAPROXY_BINARY_PATH": str(ROOT / "deploy/haproxy"),
                    "RAY_SERVE_HAPROXY_STATS_PORT": str(self.stats_port),
                    "RAY_SERVE_HAPROXY_METRICS_PORT": str(self.metrics_port),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                preexec_fn=limit_files,
            )
        self.started = [self._next_pid()]

    def _next_pid(self) -> psutil.Process:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, (self.folder / "log").read_text()
        return psutil.Process(int(line))

    def reload(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("reload\n")
        self.process.stdin.flush()
        self.started.append(self._next_pid())

    def running(self) -> list[psutil.Process]:
        """HAProxy processes, including old ones that finish requests."""
        return [each for each in self.started if is_alive(each)]


class Replica(BaseHTTPRequestHandler):
    """Records the requested paths."""

    marks: ClassVar = {"/metrics": "max-age=1", "/private": "private"}
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Cache-Control", self.marks.get(self.path, "no-store"))
        self.send_header("Vary", "Origin")  # as vLLM's CORS middleware does
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"answer")


@pytest.fixture
def replica() -> Iterator[HTTPServer]:
    Replica.asked.clear()
    with ThreadingHTTPServer((HOST, 0), Replica) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Parent]]:
    parents: list[Parent] = []

    def start(**options: Any) -> Parent:
        parents.append(Parent(tmp_path, **options))
        return parents[-1]

    yield start
    for parent in parents:
        kill(parent.running())
        parent.process.kill()
        parent.process.communicate()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_haproxy_and_its_old_process_end_with_their_parent(
    start: Callable[..., Parent], end: signal.Signals
) -> None:
    parent = start()
    with socket.create_connection((HOST, parent.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")  # an incomplete request
        parent.reload()
        assert len(parent.running()) == 2
        parent.process.send_signal(end)
        eventually(lambda: not parent.running(), "both gone", GONE_S)
    parent.process.wait()
    assert not answers(parent.port)


def test_a_reload_keeps_the_ports_and_lets_no_other_user_or_machine_control_haproxy(
    start: Callable[..., Parent],
) -> None:
    parent = start()
    control = parent.folder / "admin.sock"
    assert stat.S_IMODE(control.stat().st_mode) == 0o600
    parent.reload()
    eventually(lambda: len(parent.running()) == 1, "the old one gone", GONE_S)
    (left,) = parent.running()
    assert left == parent.started[-1]
    found = {(each.laddr.ip, each.laddr.port) for each in connections(left)}
    assert found == {(HOST, port) for port in (parent.port, parent.stats_port, parent.metrics_port)}
    assert stat.S_IMODE(control.stat().st_mode) == 0o600


def test_only_a_public_answer_is_cached_for_one_second(
    start: Callable[..., Parent], replica: HTTPServer
) -> None:
    url = f"http://{HOST}:{start(replica_port=replica.server_port).port}"
    with httpx.Client(base_url=url, timeout=30) as client:

        def num_asked(path: str, **headers: str) -> int:
            """How many of 20 requests reach the replica."""
            Replica.asked.clear()
            assert {client.get(path, headers=headers).text for _ in range(20)} == {"answer"}
            return Replica.asked.count(path)

        assert num_asked("/v1/models") == num_asked("/private") == 20
        assert num_asked("/metrics", authorization="Bearer key") == 20
        assert num_asked("/metrics", origin="http://elsewhere") == 20
        began = time.monotonic()
        # HAProxy counts whole seconds, and one more may end here.
        assert 1 <= num_asked("/metrics") <= 2 + int(time.monotonic() - began)
        Replica.asked.clear()
        eventually(lambda: client.get("/metrics") and Replica.asked, "asked again", GONE_S)


def test_a_replica_is_found_at_the_configured_address(start: Callable[..., Parent]) -> None:
    host = "127.0.0.2"  # Serve expects its node's replicas elsewhere
    with ThreadingHTTPServer((host, 0), Replica) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        parent = start(host=host, replica_port=server.server_port)
        url = f"http://{host}:{parent.port}/v1/models"

        def has_answered() -> bool:
            with suppress(httpx.HTTPError):
                return httpx.get(url, timeout=30).text == "answer"
            return False

        for _ in range(2):
            eventually(has_answered, "an answer", GONE_S)
            parent.reload()
        server.shutdown()


def test_haproxy_logs_a_lower_connection_limit(start: Callable[..., Parent]) -> None:
    parent = start(max_files=1024)
    parent.reload()
    logs = list(parent.folder.glob("*.stderr.log"))
    assert len(logs) == len(parent.started)
    for log in logs:
        assert log.read_text().startswith("haproxy: 329 connections at most: 1024 open files\n")


def test_a_port_in_use_is_reported_with_its_process(start: Callable[..., Parent]) -> None:
    (port,) = free_ports(1)
    with socket.create_server((HOST, port)), pytest.raises(AssertionError) as error:
        start(port=port)
    assert f"haproxy: port {port} (the API) is in use by " in str(error.value)
    assert f"(pid {os.getpid()})" in str(error.value)


def test_haproxy_does_not_start_if_its_parent_has_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specserve.serve.haproxy", str(os.getpid() + 1), "-v"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "haproxy: the process that started it has ended\n"


def test_only_the_address_of_the_metrics_becomes_local() -> None:
    config = "frontend prometheus\n    bind :9101\nfrontend http_frontend\n    bind *:8000\n"
    assert closed(config) == config.replace("bind :9101", "bind 127.0.0.1:9101")


@pytest.mark.parametrize(
    ("max_files", "limit"),
    [(resource.RLIM_INFINITY, None), (20_000, None), (10_000, 3920), (100, 1)],
)
def test_connections_are_limited_by_the_open_file_limit(max_files: int, limit: int | None) -> None:
    assert connection_limit("global\n    maxconn 4096\n", max_files) == limit


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0


def connections(process: psutil.Process) -> list[Any]:
    found = process.net_connections(kind="tcp")
    return [each for each in found if each.status == psutil.CONN_LISTEN]
