from __future__ import annotations

import re
import runpy
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "deploy/requirements"
LOCK = (REQUIREMENTS / "cpu.txt").read_text().splitlines()


def test_the_lock_holds_names_and_versions_only() -> None:
    assert len(LOCK) > 100
    for line in LOCK:
        assert re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", line), line


def test_the_lock_names_each_package_once_in_order() -> None:
    names = [line.split("==")[0] for line in LOCK]
    assert len(set(names)) == len(names)
    assert sorted(LOCK) == LOCK
    assert set(names).isdisjoint({"torchvision", "torchaudio", "torchcodec", "triton"})


def test_every_input_is_locked() -> None:
    names = {line.split("==")[0] for line in LOCK}
    for line in (REQUIREMENTS / "cpu.in").read_text().splitlines():
        if line and not line.startswith("#"):
            name = re.split(r"[\[=<>]", line)[0].lower()
            assert name in names


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
