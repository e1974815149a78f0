"""`make test` reports missing programs, and in CI it installs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "tools.sh"
PACKAGES = {
    "prometheus": "prometheus",
    "chromium": "chromium",
    "ip": "iproute2",
    "docker-compose": "docker-compose",
    "g++": "g++",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A PATH without the programs, and with an apt-get that records its arguments."""
    for name in ("sh", "tail", "printf", "chmod", "rm"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    program(tmp_path / "id", "echo 0")
    program(tmp_path / "apt-get", f'echo "$@" >> {tmp_path}/asked')
    return tmp_path


def program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def run(folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [SCRIPT],
        env={"PATH": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def asked(folder: Path) -> list[list[str]]:
    path = folder / "asked"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_one_line_names_missing_programs_and_the_command(folder: Path) -> None:
    program(folder / "chromium", "true")
    said = run(folder)
    wanted = " ".join(package for package in PACKAGES.values() if package != "chromium")
    assert said.count("\n") == 1
    assert said.strip().endswith(f"apt-get install --no-install-recommends {wanted}")
    assert not asked(folder)


def test_nothing_is_printed_if_nothing_is_missing(folder: Path) -> None:
    for name in PACKAGES:
        program(folder / name, "true")
    assert run(folder, CI="true") == ""
    assert not asked(folder)


def test_without_root_nothing_is_installed_in_ci(folder: Path) -> None:
    program(folder / "id", "echo 1000")
    assert run(folder, CI="true").count("\n") == 1
    assert not asked(folder)


def test_ci_installs_each_program_and_reports_a_failure(folder: Path) -> None:
    note = f'echo "$@" >> {folder}/asked'
    fail = 'case "$*" in *iproute2) echo E: gone; exit 100; esac'
    program(folder / "apt-get", f"{note}\n{fail}")
    lines = run(folder, CI="true").splitlines()
    update, *installs = asked(folder)
    assert update[0] == "update"
    assert [each[-1] for each in installs] == list(PACKAGES.values())
    assert all({"--yes", "--no-install-recommends", "-qq"} <= set(each) for each in installs)
    assert [line.removeprefix("installing ") for line in lines if "installing" in line] == list(
        PACKAGES.values()
    )
    assert [line for line in lines if "installing" not in line] == [
        "its tests will be skipped: E: gone"
    ]


def test_services_of_the_packages_are_not_started(folder: Path) -> None:
    policy = Path("/usr/sbin/policy-rc.d")
    if os.geteuid() != 0:
        pytest.skip("only root may forbid it")
    existed = policy.exists()
    program(
        folder / "apt-get",
        f'[ "$1" = update ] || {policy} >> {folder}/asked; echo $? >> {folder}/asked',
    )
    run(folder, CI="true")
    assert "101" in (folder / "asked").read_text()
    assert policy.exists() == existed
