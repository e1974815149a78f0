from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[1] / "deploy/requirements"
FEWEST = {"cpu": 100, "docs": 20}
"""Minimum number of packages in each lock."""

each_lock = pytest.mark.parametrize("lock", FEWEST)


def lines_of(lock: str) -> list[str]:
    return (REQUIREMENTS / f"{lock}.txt").read_text().splitlines()


@each_lock
def test_the_lock_holds_names_and_versions_only(lock: str) -> None:
    assert len(lines_of(lock)) > FEWEST[lock]
    for line in lines_of(lock):
        assert re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", line), line


@each_lock
def test_the_lock_names_each_package_once_in_order(lock: str) -> None:
    names = [line.split("==")[0] for line in lines_of(lock)]
    assert len(set(names)) == len(names)
    assert sorted(lines_of(lock)) == lines_of(lock)
    assert set(names).isdisjoint({"torchvision", "torchaudio", "torchcodec", "triton"})


@each_lock
def test_every_input_is_locked(lock: str) -> None:
    names = {line.split("==")[0] for line in lines_of(lock)}
    for line in (REQUIREMENTS / f"{lock}.in").read_text().splitlines():
        if line and not line.startswith(("#", "-c ")):
            name = re.split(r"[\[=<>]", line)[0].lower()
            assert name in names


def test_the_docs_lock_has_the_versions_of_the_installation() -> None:
    """`make docs` installs them into the same environment."""
    installed = dict(line.split("==") for line in lines_of("cpu"))
    shared = [line.split("==") for line in lines_of("docs") if line.split("==")[0] in installed]
    assert shared
    assert [[name, installed[name]] for name, _ in shared] == shared


def test_a_lock_is_sorted_normalised_and_without_cuda_builds() -> None:
    lines = runpy.run_path(str(REQUIREMENTS / "lock.py"))["lines"]
    packages = [
        ("Zope.Thing_x", "1"),
        ("torch", "2.13.0+cpu"),
        ("nvidia-nccl", "2"),
        ("triton", "3"),
    ]
    report = {"install": [{"metadata": {"name": n, "version": v}} for n, v in packages]}
    assert lines(report) == ["torch==2.13.0+cpu", "zope-thing-x==1"]
