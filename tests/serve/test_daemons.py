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


Tree = dict[str, psutil.Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[Tree]]]:
    """Starts trees by their roots' commands. Returns their processes once the workers watch."""
    roots: list[subprocess.Popen[str]] = []
    every: list[psutil.Process] = []
    bash = shutil.which("bash")
    assert bash
    for name in ("gcs_server", "raylet", AGENT):
        (tmp_path / name).symlink_to(bash)

    def start(*commands: tuple[str, str]) -> list[Tree]:
        for script, _ in commands:
            (tmp_path / script).write_text(OWNER.format(folder=tmp_path))
        for script, argument in commands:
            command = [sys.executable, str(tmp_path / script), argument]
            roots.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return [tree(root) for root in roots]

    def tree(root: subprocess.Popen[str]) -> Tree:
        assert root.stdout
        assert root.stdout.readline() == "\n"
        owner = psutil.Process(root.pid)
        children = owner.children(recursive=True)
        every.extend(children)
        return {"owner": owner} | {each.name(): each for each in children}

    yield start
    kill(every)
    for root in roots:
        root.kill()
        root.communicate()


def is_watched(tree: Tree) -> bool:
    command = f"specserve.serve.daemons {tree['owner'].pid} "
    every = psutil.process_iter(["cmdline"])
    return any(command in " ".join(each.info["cmdline"] or ()) for each in every)


def test_the_death_of_one_process_ends_serve_run_and_the_agents(
    start: Callable[..., list[Tree]],
) -> None:
    trees = start(*[("serve", "run")] * 3)
    assert all(map(is_watched, trees))
    for tree, first in zip(trees, ("raylet", "gcs_server", "owner"), strict=True):
        tree[first].kill()
    ended = [tree[name] for tree in trees for name in ("owner", AGENT)]
    eventually(lambda: not any(map(is_alive, ended)), "`serve run` and the agents have ended", 15)


def test_other_owners_of_the_daemons_are_not_watched(start: Callable[..., list[Tree]]) -> None:
    assert not any(map(is_watched, start(("ray", "start"), ("serve", "deploy"))))
