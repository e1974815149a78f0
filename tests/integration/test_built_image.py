"""Builds the image from its recipe and serves from it, without a container daemon.

Debian's buildah builds and runs it in a chroot. Debootstrap makes the recipe's base image, so no
registry is needed. pip finds packages by the configuration of the host.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.integration.cluster import MARK, READY_S, eventually, heed_interrupts, kill
from tests.integration.hosts import TOKEN, ip
from tests.k8s.manifests import ROOT, STAGES

BUILD_S = 3000.0
"""Packages are downloaded, and unpacked on a possibly busy machine."""
IMAGE = "localhost/specserve:cpu"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

pytestmark = pytest.mark.timeout(2 * BUILD_S)


class Images:
    """Buildah with separate storage."""

    def __init__(self, folder: Path) -> None:
        places = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self.command = ["buildah", *places, "--storage-driver", "overlay"]

    def do(self, *arguments: str) -> str:
        """Runs buildah, and returns the last line of its output."""
        done = subprocess.run(
            [*self.command, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout.strip().rpartition("\n")[2]


def make_base(images: Images, folder: Path) -> None:
    """Makes the recipe's base image: Debian with Python 3.11 and pip."""
    root = folder / "debian"
    packages = "python3.11,python3-pip,ca-certificates"
    options = ["--variant=minbase", f"--include={packages}", "bookworm", str(root)]
    subprocess.run(["debootstrap", *options], capture_output=True, timeout=BUILD_S, check=True)
    (root / "usr/bin/python").symlink_to("python3.11")
    (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()
    container = images.do("from", "scratch")
    images.do("add", container, str(root), "/")
    images.do("config", "--env", f"PATH={PATH}", container)
    images.do("commit", "--rm", container, f"docker.io/library/{STAGES['base'][0]}")
    shutil.rmtree(root)


def pip_mounts(folder: Path) -> list[str]:
    """Options that mount the host's pip configuration, and the folders that it names."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    file = configparser.RawConfigParser()
    file.add_section("global")
    paths = set()
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        words = str(ast.literal_eval(value)).split()
        file.set("global", name.rpartition(".")[2], "\n".join(words))
        for path in (Path(word.removeprefix("file://")) for word in words):
            if path.is_absolute() and path.exists():  # an index refers to files beside it
                paths.add(path.parent if path.is_dir() else path)
    with (folder / "pip.conf").open("w") as opened:
        file.write(opened)
    outer = {path for path in paths if not paths & set(path.parents)}
    mounts = [f"{path}:{path}:ro" for path in sorted(outer)]
    return [
        part for each in (f"{folder}/pip.conf:/etc/pip.conf:ro", *mounts) for part in ("-v", each)
    ]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """Buildah with the image for CPU, already built."""
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    folder = tmp_path_factory.mktemp("image")
    made = Images(folder)
    try:
        make_base(made, folder)
        recipe = ["--target", "cpu", "-f", "deploy/Dockerfile", "-t", IMAGE, "--pull-never"]
        chroot = ["--isolation", "chroot", "--network", "host"]
        made.do("bud", *recipe, *chroot, *pip_mounts(folder), ".")
        yield made
        made.do("rm", "--all")
        made.do("rmi", "--all", "--force")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Host:
    """A network namespace in which all ports are free, linked to the machine's network."""

    def __init__(self) -> None:
        self._name = f"ssi{os.getpid()}"
        network = f"198.19.{os.getpid() % 256}"
        self.address = f"{network}.6"
        ip("netns", "add", self._name)
        link = ("type", "veth", "peer", "name", "eth0", "netns", self._name)
        ip("link", "add", self._name, *link)
        ip("-n", self._name, "address", "add", f"{self.address}/30", "dev", "eth0")
        ip("-n", self._name, "link", "set", "eth0", "up")
        ip("-n", self._name, "link", "set", "lo", "up")
        ip("address", "add", f"{network}.5/30", "dev", self._name)
        ip("link", "set", self._name, "up")

    def command(self, *command: str) -> list[str]:
        """A command line for this host. As in a container, its children end with the command."""
        alone = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
        return ["ip", "netns", "exec", self._name, *alone, *command]

    def remove(self) -> None:
        """Removes the network namespace and its link."""
        ip("netns", "delete", self._name)


@pytest.fixture
def host() -> Iterator[Host]:
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    made = Host()
    yield made
    made.remove()


def compose_head(variables: Mapping[str, str]) -> tuple[list[str], dict[str, str], str]:
    """Command, environment and stop signal of the head, with the variables replaced."""
    head = yaml.safe_load((ROOT / "deploy/compose.head.yaml").read_text())["services"]["node"]

    def replaced(text: str) -> str:
        return re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: variables[found[1]], text)

    environment = {name: replaced(value) for name, value in head["environment"].items()}
    return [replaced(part) for part in head["command"]], environment, head["stop_signal"]


def processes(mark: str, title: str = "") -> list[psutil.Process]:
    """Processes of the container whose command line contains ``title``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and title in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]


def test_the_compose_files_head_serves_as_its_user_streams_and_stops(
    images: Images, host: Host, tmp_path: Path
) -> None:
    file = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())
    file["http_options"]["host"] = host.address
    config = tmp_path / "demo.yaml"
    config.write_text(yaml.safe_dump(file))
    tmp_path.chmod(0o755)
    command, environment, stop_signal = compose_head(
        {
            "RAY_AUTH_TOKEN": TOKEN,
            "HEAD_ADDRESS": host.address,
            "NODE_RESOURCES": "{}",
        }
    )
    environment |= {MARK: str(tmp_path), "HOME": "/home/specserve"}
    variables = [f"{name}={value}" for name, value in environment.items()]
    most = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])  # the compose files have 65536
    container = images.do("from", "--ulimit", f"nofile={most}:{most}", "--pull-never", IMAGE)
    options = ["--isolation", "chroot", "--network", "host", "-v", f"{config}:/app/serve.yaml:ro"]
    run = ["run", *options, container, "--", "env", *variables, *command]
    log = tmp_path / "log"
    with log.open("wb") as output:
        started = subprocess.Popen(
            host.command(*images.command, *run),
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=heed_interrupts,
        )
    try:
        url = f"http://{host.address}:{file['http_options']['port']}"
        eventually(lambda: started.poll() is not None or answers(url), log.read_text, READY_S)
        assert started.poll() is None, log.read_text()[-4000:]
        assert {uid for each in processes(str(tmp_path)) for uid in each.uids()} == {1000}
        assert processes(str(tmp_path), "haproxy")
        assert len(streamed(url)) > 1
        (serving,) = processes(str(tmp_path), "serve run")
        serving.send_signal(signal.Signals[stop_signal])
        started.wait(120)
        eventually(lambda: not processes(str(tmp_path)), "all processes gone", 15)
    finally:
        kill(processes(str(tmp_path)))
        started.wait(60)
        print(log.read_text()[-4000:])  # noqa: T201 - pytest shows it where the test fails
        images.do("rm", container)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


def streamed(url: str) -> list[str]:
    """The pieces of a streamed completion."""
    body = {"model": "demo", "prompt": "def is_even(n):", "max_tokens": 16, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(each)["choices"][0]["text"] for each in data[:-1]]
