"""Two hosts on one machine: linked network namespaces, started by the scripts of deploy."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.integration.cluster import Cluster, Deployment, serve_run

HEAD, WORKER = "198.18.0.1", "198.18.0.2"
PORT = 8000
DRAIN_S = 130
"""Longest drain of the worker in seconds, as in deploy/compose.worker.yaml."""
TOKEN = "a token that only the tests know"
SMALL = ("--num-cpus", "2", "--num-gpus", "0", "--object-store-memory", str(100 << 20))
ROOT = Path(__file__).parents[2]


class NoHostsError(Exception):
    """Network namespaces and links cannot be created here. The message says why."""


class TwoHosts(Cluster):
    """A head and a worker, with 2 CPUs each, and a network between them that can be cut.

    Clients reach the head over a separate link.

    Raises:
        NoHostsError: namespaces or links are not permitted.
    """

    def __init__(self) -> None:
        super().__init__([2, 2])
        tag = f"ss{os.getpid()}"
        self.head, self.worker = f"{tag}-head", f"{tag}-worker"
        self.address = f"{HEAD}:6379"
        network = f"198.19.{os.getpid() % 256}"  # visible to the whole machine
        self.client_address = f"{network}.2"
        self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        try:
            for host in (self.head, self.worker):
                ip("netns", "add", host)
            peer = ("type", "veth", "peer", "name")
            ip("link", "add", "eth0", "netns", self.head, *peer, "eth0", "netns", self.worker)
            ip("link", "add", tag, *peer, "eth1", "netns", self.head)
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove_hosts()
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
            raise NoHostsError(f"no network namespaces here: {str(said).strip()}") from None
        for host, interface, address in (
            (self.head, "eth0", f"{HEAD}/30"),
            (self.worker, "eth0", f"{WORKER}/30"),
            (self.head, "eth1", f"{self.client_address}/30"),
        ):
            ip("-n", host, "address", "add", address, "dev", interface)
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", interface, "up")
        ip("address", "add", f"{network}.1/30", "dev", tag)
        ip("link", "set", tag, "up")

    def start(self) -> None:
        """Starts both hosts, and waits until they are alive."""
        self._start_host(
            *self.on(self.head, "deploy/head.sh", HEAD, "--temp-dir", str(self.folder)),
            *("--no-monitor", "--include-dashboard", "false"),
            *("--resources", '{"specserve_head": 1}'),
        )
        self.start_worker()

    def start_worker(self, *wrapper: str) -> None:
        """Starts the worker, inside a wrapper command if given, and waits until it is alive."""
        drains = f"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S={DRAIN_S}"
        self._start_host(*self.on(self.worker, "env", drains, *wrapper, "deploy/worker.sh", HEAD))

    def stop_worker(self, timeout_s: float = 60) -> None:
        """Stops the worker."""
        self._heads[-1].terminate()
        self.await_worker_ended(timeout_s)

    def await_worker_ended(self, timeout_s: float) -> None:
        """Waits until the worker's script has ended."""
        self._heads[-1].wait(timeout_s)

    def stop(self) -> None:
        """Stops both hosts, and removes their network."""
        try:
            super().stop()
        finally:
            self._remove_hosts()

    def on(self, host: str, *command: str) -> list[str]:
        """The command line that runs a command on a host."""
        return ["ip", "netns", "exec", host, *command]

    @contextmanager
    def cut(self, seconds: float) -> Iterator[None]:
        """Cuts the link between the hosts for some seconds. The block may last longer."""
        ip("-n", self.worker, "link", "set", "eth0", "down")
        mended = threading.Timer(seconds, ip, ("-n", self.worker, "link", "set", "eth0", "up"))
        mended.start()
        try:
            yield
        finally:
            mended.join()

    def raylet_of_worker(self) -> psutil.Process:
        """The worker's raylet process."""
        (raylet,) = (
            process
            for process in self.processes(f"--node_ip_address={WORKER}")
            if process.name() == "raylet"
        )
        return raylet

    def _start_host(self, *command: str) -> None:
        log = self.folder / f"node{len(self._heads)}.log"
        with log.open("wb") as output:
            self._heads.append(
                subprocess.Popen(
                    [*command, *SMALL],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    start_new_session=True,
                )
            )
        self._await_nodes(len(self._heads))

    def _remove_hosts(self) -> None:
        for host in (self.head, self.worker):  # this removes their ends of the links too
            subprocess.run(["ip", "netns", "delete", host], check=False, capture_output=True)


class HostsDeployment(Deployment):
    """`serve run FILE` on the head.

    Args:
        hosts: the hosts that serve.
        content: content of the file.
    """

    def __init__(self, hosts: TwoHosts, content: dict[str, Any]) -> None:
        self.cluster = self._hosts = hosts
        self.port, self.prefixes = PORT, [""]
        self.log = hosts.folder / "serve.log"
        self._process = serve_run(hosts, content, self.log, *hosts.on(hosts.head))

    def base_url(self, prefix: str = "") -> str:
        """Base URL for clients."""
        return f"http://{self._hosts.client_address}:{PORT}{prefix}"


def ip(*arguments: str) -> None:
    """Runs a command of iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
