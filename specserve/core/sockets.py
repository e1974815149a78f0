"""Where vLLM's Unix domain sockets lie, and how long their paths may be."""

from __future__ import annotations

import os
import sys
from pathlib import Path

RPC_BASE_PATH = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder of its sockets."""

_MAX_PATH = 103 if sys.platform == "darwin" else 107
"""Bytes; ``sun_path`` of sys/un.h without its last zero."""
_NAME = len("/") + 36
"""Bytes of a UUID's digits and dashes, behind a folder."""


def takes_sockets(folder: Path) -> bool:
    """Whether sockets can be made in a folder under names as vLLM gives them, which are UUIDs."""
    return len(os.fsencode(folder)) + _NAME <= _MAX_PATH
