"""`serve run` with its own Ray cluster and HAProxy leaves no process behind when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from specserve.serve.daemons import is_alive
from tests.integration.cluster import (
    HAPROXY,
    HOST,
    Cluster,
    describe,
    eventually,
    free_ports,
    heed_interrupts,
    kill,
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HAPROXY.exists(), reason="Ray brings HAProxy for Linux only"),
]

ROOT = Path(__file__).parents[2]
GONE_S = 45.0
"""Less than the minute for which some of Ray's processes outlive an end that nothing hastens."""
READY_S = 180.0


class Run:
    """`serve run FILE` with the variables of `make serve`. It is ready after construction."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        (self.port,) = free_ports(1)
        file = cluster.folder / "small.yaml"
        file.write_text(yaml.safe_dump(self._content()))
        self._log = cluster.folder / "serve.log"
        environment = cluster.environment | {
            "PYTHONPATH": str(ROOT),
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["serve", "run", str(file)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=heed_interrupts,
            )
        self._root = psutil.Process(self.process.pid)
        self.started: list[psutil.Process] = []
        try:
            eventually(self.answers, self._log.read_text, READY_S)
        finally:
            self.started = self._root.children(recursive=True)

    def _content(self) -> dict[str, object]:
        application = {"name": "small", "import_path": "tests.integration.small_app:app"}
        return {
            "proxy_location": "HeadOnly",
            "http_options": {"host": HOST, "port": self.port},
            "applications": [application],
        }

    def answers(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            return httpx.get(f"http://{HOST}:{self.port}/", timeout=10).text == "here"
        except httpx.HTTPError:
            return False

    def named(self, name: str) -> psutil.Process:
        """A process that it started, by the beginning of its program's name."""
        for each in self.started:
            with suppress(psutil.NoSuchProcess):
                if each.name().startswith(name):
                    return each
        raise AssertionError(f"no process {name}: {self._log.read_text()}")

    def left(self) -> list[psutil.Process]:
        self.process.poll()
        return [each for each in (self._root, *self.started) if is_alive(each)]

    def await_gone(self) -> None:
        eventually(
            lambda: not self.left(), lambda: str([describe(each) for each in self.left()]), GONE_S
        )


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster([])
    cluster.use_haproxy()
    yield cluster
    cluster.stop()


@contextmanager
def running(cluster: Cluster) -> Iterator[Run]:
    run = Run(cluster)
    try:
        yield run
    finally:
        kill(run.left())
        run.process.wait()


def test_a_killed_run_leaves_no_process_and_the_next_one_ends_too(cluster: Cluster) -> None:
    with running(cluster) as run:
        assert run.named("haproxy")
        run.process.kill()
        run.await_gone()
    with running(cluster) as run:
        os.killpg(run.process.pid, signal.SIGTERM)
        run.await_gone()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_signal_leaves_a_process_in_two_runs(cluster: Cluster, end: signal.Signals) -> None:
    for _ in range(2):
        with running(cluster) as run:
            run.process.send_signal(end)
            run.await_gone()


@pytest.mark.parametrize("daemon", ["raylet", "gcs_server"])
def test_a_killed_daemon_ends_every_process(cluster: Cluster, daemon: str) -> None:
    with running(cluster) as run:
        run.named(daemon).kill()
        run.await_gone()


def test_haproxy_ends_with_its_actor_and_restarts_with_the_next(cluster: Cluster) -> None:
    with running(cluster) as run:
        old = run.named("haproxy")
        run.named("ray::HAProxyMan").kill()
        eventually(lambda: not is_alive(old), "HAProxy gone", GONE_S)
        eventually(run.answers, "another one", 60)
        run.started = psutil.Process(run.process.pid).children(recursive=True)
