"""The folder of the sockets and rendezvous files that vLLM makes on a node.

vLLM takes the system's temporary folder. Ray ends its actors by killing them, so that what they
have made stays there. In the folder of Ray's session it lies beside Ray's own sockets and logs.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from uuid import uuid4

import ray

_MAX_PATH = 103 if os.uname().sysname == "Darwin" else 107
"""Bytes of a socket's path; ``sun_path`` of sys/un.h without its last zero."""


def socket_folder(session: Path) -> str:
    """The folder for sockets that vLLM names by a UUID.

    Args:
        session: folder of Ray's session on this node; the temporary folder takes its place where
            a socket's path would be too long in it.
    """
    folder = session / "sockets"
    is_short = len(os.fsencode(folder / str(uuid4()))) <= _MAX_PATH
    return str(folder) if is_short else tempfile.gettempdir()


def keep_sockets_in_session() -> None:
    """Has vLLM in this process, and in those that it starts, take the folder of Ray's session.

    Ray must be initialized. ``VLLM_RPC_BASE_PATH`` is left as it is where it is set.
    """
    context = ray.get_runtime_context()
    session = Path(context.get_temp_dir(), context.get_session_name())
    os.environ.setdefault("VLLM_RPC_BASE_PATH", socket_folder(session))
