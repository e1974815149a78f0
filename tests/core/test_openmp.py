from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.core.openmp import openmp_environment

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import torch
held = torch.ones(64 << 20, dtype=torch.uint8)
print(open("/proc/self/smaps_rollup").read())
"""


@pytest.mark.parametrize("is_on", [True, False])
def test_large_tensors_are_in_huge_pages_unless_the_user_switches_them_off(
    is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_on:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | openmp_environment(1),
        capture_output=True,
        text=True,
        check=True,
    )
    match = re.search(r"AnonHugePages:\s+(\d+) kB", done.stdout)
    assert match is not None
    (policy,) = re.findall(r"\[(\w+)\]", HUGE_PAGES.read_text())
    has_huge_pages = int(match[1]) >= 32 << 10
    assert has_huge_pages == {"always": True, "madvise": is_on, "never": False}[policy]
