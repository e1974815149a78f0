"""How long the path of a Unix domain socket may be."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from uuid import uuid4

_MAX_PATH = 103 if sys.platform == "darwin" else 107
"""Bytes; ``sun_path`` of sys/un.h without its last zero."""


def takes_sockets(folder: Path) -> bool:
    """Whether sockets can be made in a folder under names as vLLM gives them, which are UUIDs."""
    return len(os.fsencode(folder / str(uuid4()))) <= _MAX_PATH
