"""No process and no folder of an engine are left after any end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from specserve.compare import engine_process
from specserve.compare.engine_process import EngineProcess
from specserve.core.config import AppConfig, parse
from specserve.engine.methods import parse_method

NAME = engine_process.__name__


@pytest.fixture
def config() -> AppConfig:
    return parse({"model": {"path": "nowhere"}})


@contextmanager
def interrupted(config: AppConfig) -> Iterator[psutil.Process]:
    """The child of a run that Ctrl-C ends after the block."""
    with suppress(KeyboardInterrupt), EngineProcess(config, parse_method("none", config)):
        (child,) = (each for each in psutil.Process().children() if NAME in each.cmdline())
        yield child
        raise KeyboardInterrupt


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    return tmp_path


def test_an_interrupt_removes_the_engines_files(config: AppConfig, temporary: Path) -> None:
    with interrupted(config) as child:
        folder = Path(child.cmdline()[-1])
        assert folder.parent == temporary
        (folder / "vllm_dist_0").touch()
    assert not child.is_running()
    assert list(temporary.iterdir()) == []


def test_the_engines_sockets_are_in_its_folder_if_the_path_is_short(
    config: AppConfig, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def variable() -> str:
        with interrupted(config) as child:
            return str(child.environ()["VLLM_RPC_BASE_PATH"])

    with tempfile.TemporaryDirectory(prefix="ss", dir="/tmp") as short:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", short)
        assert Path(variable()).parent == Path(short)
    long = temporary / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(long))
    assert variable() == str(long)


def test_a_child_whose_parent_was_killed_removes_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "vllm_dist_0").touch()
    reader, writer = os.pipe()
    os.close(writer)
    subprocess.run(
        [sys.executable, "-m", NAME, str(reader), str(folder)],
        pass_fds=[reader],
        check=True,
        timeout=60,
    )
    os.close(reader)
    assert not folder.exists()
