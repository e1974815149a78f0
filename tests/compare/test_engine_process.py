"""What is left of an engine's own process and folder, however they end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from specserve.compare import engine_process
from specserve.compare.engine_process import EngineProcess
from specserve.core.config import AppConfig, parse
from specserve.engine.methods import parse_method


@pytest.fixture
def config() -> AppConfig:
    return parse({"model": {"path": "nowhere"}})


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_an_interrupt_leaves_nothing_of_what_the_engine_has_written(
    config: AppConfig, temporary: Path
) -> None:
    with suppress(KeyboardInterrupt), EngineProcess(config, parse_method("none", config)):
        (child,) = psutil.Process().children()
        folder = Path(child.environ()["VLLM_RPC_BASE_PATH"])
        assert folder.parent == temporary
        (folder / "vllm_dist_0").touch()
        raise KeyboardInterrupt
    assert not child.is_running()
    assert list(temporary.iterdir()) == []


def test_a_child_whose_parent_was_killed_removes_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    reader, writer = os.pipe()
    os.close(writer)
    subprocess.run(
        [sys.executable, "-m", engine_process.__name__, str(reader)],
        env=os.environ | {"VLLM_RPC_BASE_PATH": str(folder)},
        pass_fds=[reader],
        check=True,
    )
    os.close(reader)
    assert not folder.exists()
