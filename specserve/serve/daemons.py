"""Ends what ``serve run`` has started of Ray when a part of it has died.

``serve run`` without an address starts Ray's daemons as its children, and does not notice that one
dies. The dead raylet stays a zombie, which Ray's workers take for alive: they go on, and nothing
that fails is replaced any more. Once ``serve run`` has ended, the kernel and Ray end all but the
raylet's agents: they try for 60 s to tell the control store, which is gone as well.

``python -m specserve.serve.daemons SERVE_RUN RAYLET`` watches two processes, given by their ids.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

INTERVAL_S = 1.0
END_S = 4.0
"""How long ``serve run``, and then the agents, may take to end by themselves, in seconds."""

_DAEMONS = ("raylet", "gcs_server")
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def watch() -> None:
    """Has a process watch the daemons of the cluster whose worker this process is.

    It outlives this one, and ends with the cluster. There is one, however often it is asked for,
    and none where ``serve run`` joined a cluster: ``ray start`` has daemons to itself.
    """
    with suppress(psutil.Error):
        raylet = psutil.Process(os.getppid())
        owner = raylet.parent()
        if owner is not None and _is_serve_run(owner):
            subprocess.run(
                [sys.executable, "-m", "specserve.serve.daemons", str(owner.pid), str(raylet.pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a signal to the group of `serve run` is not for it
                check=False,
            )


def _is_serve_run(process: psutil.Process) -> bool:
    command = process.cmdline()[1:3]
    return len(command) == 2 and Path(command[0]).name == "serve" and command[1] == "run"


def guard(
    owner: psutil.Process, daemons: dict[psutil.Process, str], agents: list[psutil.Process]
) -> None:
    """Waits until ``serve run`` or one of its daemons has died, and ends what may be left.

    The daemons, with their names, are children of ``owner``, and the agents those of the raylet.
    """
    while all(map(is_alive, (owner, *daemons))):
        time.sleep(INTERVAL_S)
    if is_alive(owner):
        dead = " and ".join(name for daemon, name in daemons.items() if not is_alive(daemon))
        sys.stderr.write(f"specserve: Ray's {dead} has died: ending `serve run`\n")
        sys.stderr.flush()
        with suppress(psutil.Error):
            owner.terminate()
        _kill_after(END_S, [owner])
    _kill_after(END_S, agents)


def _kill_after(seconds: float, processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether the process runs; a zombie does not."""
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def main() -> None:
    """Guards in the background, unless another process does already."""
    owner, raylet = (psutil.Process(int(argument)) for argument in sys.argv[1:])
    # Before the fork: who asked for the guard goes on when all are known.
    daemons = {child: child.name() for child in owner.children() if child.name() in _DAEMONS}
    agents = [child for child in raylet.children() if child.name() in _AGENTS]
    if os.fork():
        return  # Ray ends the children of a worker with it
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0specserve-daemons-{owner.pid}")
        except OSError:
            return
        guard(owner, daemons, agents)


if __name__ == "__main__":
    main()
