"""Prometheus' own checker of rules and queries."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def promtool(*arguments: str | Path) -> None:
    """Runs promtool. If it refuses, the test fails with its output."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
