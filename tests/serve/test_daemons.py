"""A process tree like that of `serve run` and Ray, with shells instead of Ray's daemons."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from specserve.serve.daemons import is_alive
from tests.integration.cluster import eventually, kill

AGENT = "ray::DashboardAgent"
WORKER = (
    "import time; from specserve.serve.daemons import watch; "
    "watch(); print(flush=True); time.sleep(99)"
)
OWNER = f"""
import subprocess
subprocess.Popen(["{{folder}}/gcs_server", "-c", "sleep 99; :"])
agent = "'{{folder}}/ray::DashboardAgent' -c 'sleep 99; :' & sleep 1; "
subprocess.Popen(["{{folder}}/raylet", "-c", agent + "'{sys.executable}' -c '{WORKER}'; :"])
import time
time.sleep(99)  # waits for no child, as `serve run`
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str], dict[str, psutil.Process]]]:
    """Starts a tree by its root's command. Returns its processes once the worker watches."""
    roots: list[subprocess.Popen[str]] = []
    every: list[psutil.Process] = []
    bash = shutil.which("bash")
    assert bash
    for name in ("gcs_server", "raylet", AGENT):
        (tmp_path / name).symlink_to(bash)

    def start(script: str, argument: str) -> dict[str, psutil.Process]:
        (tmp_path / script).write_text(OWNER.format(folder=tmp_path))
        root = subprocess.Popen(
            [sys.executable, tmp_path / script, argument], stdout=subprocess.PIPE, text=True
        )
        roots.append(root)
        assert root.stdout
        assert root.stdout.readline() == "\n"
        found = psutil.Process(root.pid)
        every.extend(found.children(recursive=True))
        return {"owner": found} | {each.name(): each for each in found.children(recursive=True)}

    yield start
    for root in roots:
        kill(every)
        root.kill()
        root.communicate()


@pytest.mark.parametrize("first", ["raylet", "gcs_server", "owner"])
def test_the_death_of_one_process_ends_serve_run_and_the_agents(
    start: Callable[[str, str], dict[str, psutil.Process]], first: str
) -> None:
    tree = start("serve", "run")
    tree[first].kill()
    eventually(lambda: not is_alive(tree["owner"]), "`serve run` has ended", 15)
    eventually(lambda: not is_alive(tree[AGENT]), "the agent has ended", 15)


@pytest.mark.parametrize("command", [("ray", "start"), ("serve", "deploy")])
def test_other_owners_of_the_daemons_are_not_ended(
    start: Callable[[str, str], dict[str, psutil.Process]], command: tuple[str, str]
) -> None:
    tree = start(*command)
    tree["raylet"].kill()
    with pytest.raises(psutil.TimeoutExpired):
        tree["owner"].wait(3)
