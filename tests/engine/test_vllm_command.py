from __future__ import annotations

import subprocess
import sys

import vllm


def test_the_version_is_that_of_the_package_for_cpu() -> None:
    command = [sys.executable, "-m", "specserve.engine.vllm_command", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines()[-1].startswith(vllm.__version__.partition("+")[0]), run.stderr
