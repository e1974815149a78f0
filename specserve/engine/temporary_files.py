"""Puts vLLM's sockets and rendezvous files into the folder of Ray's session.

Ray kills its actors, and a killed process leaves these files. vLLM puts them into the system's
temporary folder. In the session's folder they are beside Ray's own sockets and logs.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from uuid import uuid4

import ray
from vllm import envs
from vllm.v1.executor import multiproc_executor, uniproc_executor

from specserve.core.sockets import RPC_BASE_PATH, takes_sockets


def socket_folder(session: Path) -> str:
    """Returns the folder for vLLM's sockets, within Ray's session folder on this node.

    If a socket's path would be too long there, it returns the system's temporary folder.
    """
    folder = session / "sockets"
    return str(folder) if takes_sockets(folder) else tempfile.gettempdir()


def keep_sockets_in_session() -> None:
    """Makes vLLM use Ray's session folder, in this process and its child processes.

    Ray must be initialized. A folder that the environment already sets is kept.
    """
    context = ray.get_runtime_context()
    session = Path(context.get_temp_dir(), context.get_session_name())
    os.environ.setdefault(RPC_BASE_PATH, socket_folder(session))


def keep_rendezvous_with_sockets() -> None:
    """Makes this process's executors put their rendezvous file beside the sockets."""
    for module in (uniproc_executor, multiproc_executor):
        module.get_file_store_init_method = _rendezvous


def _rendezvous() -> str:
    return f"file://{envs.VLLM_RPC_BASE_PATH}/vllm_dist_{uuid4().hex}"
