from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest

from specserve.core.sockets import takes_sockets


@pytest.mark.parametrize(("num_bytes", "is_short"), [(107, True), (108, False)])
def test_the_path_limit_of_sockets_is_the_kernels(num_bytes: int, is_short: bool) -> None:
    name = str(uuid4())
    with tempfile.TemporaryDirectory(prefix="ss", dir="/tmp") as base:
        folder = Path(base, "x" * (num_bytes - len(f"{base}//{name}")))
        folder.mkdir()
        assert takes_sockets(folder) == is_short
        with socket.socket(socket.AF_UNIX) as bound:
            try:
                bound.bind(str(folder / name))
            except OSError:
                assert not is_short
            else:
                assert is_short
