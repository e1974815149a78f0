"""The folder of vLLM's Unix domain sockets, and the limit of their paths."""

from __future__ import annotations

import os
import sys
from pathlib import Path

RPC_BASE_PATH = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder of its sockets."""

_MAX_PATH = 103 if sys.platform == "darwin" else 107
"""Longest path of a socket in bytes: ``sun_path`` of sys/un.h without its final zero."""
_NAME = len("/") + 36
"""Bytes of a socket's name behind its folder: a slash and a UUID."""


def takes_sockets(folder: Path) -> bool:
    """Whether the paths of vLLM's sockets, which are named by UUIDs, fit in this folder."""
    return len(os.fsencode(folder)) + _NAME <= _MAX_PATH
