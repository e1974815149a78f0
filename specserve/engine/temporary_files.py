"""Where vLLM puts its sockets and rendezvous files, which stay when a process is killed.

vLLM takes the system's temporary folder, and Ray ends its actors by killing them. In the folder of
Ray's session they lie beside Ray's own sockets and logs.
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
    """The folder for vLLM's sockets: in Ray's session on this node, or the temporary folder.

    The latter where a socket's path would be too long in the session's folder.
    """
    folder = session / "sockets"
    return str(folder) if takes_sockets(folder) else tempfile.gettempdir()


def keep_sockets_in_session() -> None:
    """Has vLLM in this process, and in those that it starts, take the folder of Ray's session.

    Ray must be initialized. A folder that the environment names stays.
    """
    context = ray.get_runtime_context()
    session = Path(context.get_temp_dir(), context.get_session_name())
    os.environ.setdefault(RPC_BASE_PATH, socket_folder(session))


def keep_rendezvous_with_sockets() -> None:
    """Has the executors of this process put their rendezvous file where the sockets lie."""
    for module in (uniproc_executor, multiproc_executor):
        module.get_file_store_init_method = _rendezvous


def _rendezvous() -> str:
    return f"file://{envs.VLLM_RPC_BASE_PATH}/vllm_dist_{uuid4().hex}"
