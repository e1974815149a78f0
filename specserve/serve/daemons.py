"""Ends ``serve run`` and Ray's agents when a daemon that ``serve run`` started has died.

``serve run`` without an address starts Ray's daemons as its children, and does not notice when one
dies. A dead raylet stays as a zombie, which Ray's workers take for alive. They go on, but nothing
that fails is replaced. When ``serve run`` ends, the kernel and Ray end all other processes except
the raylet's agents. The agents try for 60 s to reach the control store, which has ended too.

``python -m specserve.serve.daemons SERVE_RUN RAYLET`` takes the two process ids.
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
"""Seconds that ``serve run``, and then the agents, have to end before they are killed."""

_DAEMONS = ("raylet", "gcs_server")
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def watch() -> None:
    """Starts a process that watches the Ray daemons of the cluster to which this worker belongs.

    The process outlives this one, and ends with the cluster. Further calls start no second one. If
    ``serve run`` joined a running cluster, none is started: the daemons belong to ``ray start``.
    """
    with suppress(psutil.Error):
        raylet = psutil.Process(os.getppid())
        owner = raylet.parent()
        if owner is not None and _is_serve_run(owner):
            subprocess.run(
                [sys.executable, "-m", "specserve.serve.daemons", str(owner.pid), str(raylet.pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # so that signals to the group of `serve run` miss it
                check=False,
            )


def _is_serve_run(process: psutil.Process) -> bool:
    command = process.cmdline()[1:3]
    return len(command) == 2 and Path(command[0]).name == "serve" and command[1] == "run"


def guard(
    owner: psutil.Process, daemons: dict[psutil.Process, str], agents: list[psutil.Process]
) -> None:
    """Waits until ``serve run`` or one of its daemons has died, then ends it and the agents.

    ``owner`` is ``serve run``, ``daemons`` its children with their names. ``agents`` are children
    of the raylet.
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
    """Whether the process runs; False for a zombie."""
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def main() -> None:
    """Runs :func:`guard` in the background, unless another process already does."""
    owner, raylet = (psutil.Process(int(argument)) for argument in sys.argv[1:])
    # Before the fork: the caller waits until the parent exits, so no daemon is missed.
    daemons = {child: child.name() for child in owner.children() if child.name() in _DAEMONS}
    agents = [child for child in raylet.children() if child.name() in _AGENTS]
    if os.fork():
        return  # the child goes on: Ray would end a direct child together with its worker
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0specserve-daemons-{owner.pid}")
        except OSError:
            return
        guard(owner, daemons, agents)


if __name__ == "__main__":
    main()
