"""Where vLLM's sockets lie: paths as Ray makes them, and a real socket at the longest."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest

from specserve.engine.socket_folder import socket_folder

SESSION = "session_2026-11-26_18-37-41_582222_28289"


def test_sockets_lie_beside_those_of_ray() -> None:
    assert socket_folder(Path("/tmp/ray", SESSION)) == f"/tmp/ray/{SESSION}/sockets"


@pytest.mark.parametrize(("spare", "in_session"), [(0, True), (-1, False)])
def test_a_path_too_long_for_a_socket_leaves_it_in_the_temporary_folder(
    tmp_path: Path, spare: int, in_session: bool
) -> None:
    name = str(uuid4())
    limit = 107  # sun_path of Linux
    session = tmp_path / "s"
    rest = limit - spare - len(str(session / "sockets" / name))
    if rest < 0:
        pytest.skip(f"{tmp_path} is too long already")
    session = tmp_path / ("s" * (1 + rest))
    folder = session / "sockets"
    assert socket_folder(session) == (str(folder) if in_session else tempfile.gettempdir())
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as bound:
        if in_session:
            bound.bind(str(folder / name))
        else:
            with pytest.raises(OSError, match="too long"):
                bound.bind(str(folder / name))
