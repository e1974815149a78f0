from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.integration.cluster import eventually
from tests.peers.servers import Server

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
"""


@pytest.fixture
def processes() -> Iterator[list[psutil.Process]]:
    """One with a child of its own, and the child."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT], text=True, **pipes) as parent:
        assert parent.stdout is not None
        found = [psutil.Process(parent.pid), psutil.Process(int(parent.stdout.readline()))]
        try:
            yield found
        finally:
            for process in found:
                process.kill()


def test_a_server_runs_while_it_is_measured_and_at_no_other_time(
    processes: list[psutil.Process],
) -> None:
    server = Server("http://here", processes[:1])
    for _ in range(2):
        with server.alone() as url:
            assert url == "http://here"
            eventually(lambda: not any(map(_is_stopped, processes)), "both run", 5)
        eventually(lambda: all(map(_is_stopped, processes)), "both are stopped", 5)


def _is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED
