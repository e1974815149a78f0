from __future__ import annotations

import subprocess
import sys

import pytest
import vllm

from specserve.cli.main import main
from specserve.engine.vllm_command import _metadata_of
from specserve.engine.vllm_version import is_cpu_build


def test_the_version_is_that_of_the_cpu_package() -> None:
    command = [sys.executable, "-m", "specserve.engine.vllm_command", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines()[-1].startswith(vllm.__version__.partition("+")[0]), run.stderr


@pytest.mark.skipif(not is_cpu_build(), reason="needs vLLM's build for CPU")
def test_the_extras_are_those_of_the_cpu_package() -> None:
    assert "bench" in (_metadata_of("vllm").get_all("Provides-Extra") or [])


def test_a_missing_package_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: list[str]) -> None:
        raise ImportError("Please install vllm[bench] for bench support")

    monkeypatch.setattr("specserve.engine.vllm_command.run_vllm", run)
    assert main(["vllm", "--", "bench", "serve"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "specserve: error: vllm: Please install vllm[bench] for bench support"
