"""Ends ``serve run`` when a daemon of the Ray cluster that it started has died.

``serve run`` without an address starts Ray's daemons as its children, and does not notice that one
dies. The dead raylet stays a zombie, which Ray's workers take for alive: they go on, and nothing
that fails is replaced any more. When ``serve run`` ends, the kernel and Ray end all the others.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

INTERVAL_S = 1.0
TERMINATE_S = 5.0
"""How long ``serve run`` may take to end by itself, in seconds."""

_DAEMONS = ("raylet", "gcs_server")


def watch() -> None:
    """Watches the daemons from a thread of this process, which is to be a worker of Ray.

    Does nothing where ``serve run`` joined a cluster: ``ray start`` has daemons to itself.
    """
    with suppress(psutil.Error):
        raylet = psutil.Process(os.getppid())
        owner = raylet.parent()
        if owner is None or not _is_serve_run(owner):
            return
        daemons = [child for child in owner.children() if child.name() in _DAEMONS]
        threading.Thread(
            target=_watch, args=(owner, daemons), name="specserve-daemons", daemon=True
        ).start()


def _is_serve_run(process: psutil.Process) -> bool:
    command = process.cmdline()[1:3]
    return len(command) == 2 and Path(command[0]).name == "serve" and command[1] == "run"


def _watch(owner: psutil.Process, daemons: list[psutil.Process]) -> None:
    names = {daemon: daemon.name() for daemon in daemons}
    while not (dead := [daemon for daemon in daemons if not _is_alive(daemon)]):
        time.sleep(INTERVAL_S)
    with suppress(psutil.Error):
        sys.stderr.write(f"specserve: Ray's {names[dead[0]]} has died: ending `serve run`\n")
        sys.stderr.flush()
        owner.terminate()
        owner.wait(TERMINATE_S)
    with suppress(psutil.Error):
        owner.kill()


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
