from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.core.openmp import openmp_environment

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = r"""
import re, torch
held = torch.ones(64 << 20, dtype=torch.uint8)
entry = re.compile(r"^(\w+)-(\w+) .*?^THPeligible: +(\d)", re.MULTILINE | re.DOTALL)
for start, end, eligible in entry.findall(open("/proc/self/smaps").read()):
    if int(start, 16) <= held.data_ptr() < int(end, 16):
        print(eligible)
"""
"""Prints 1 if Linux may place a tensor in huge pages. Whether it does depends on free memory."""


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="the kernel has no transparent huge pages")
@pytest.mark.parametrize("is_on", [True, False])
def test_large_tensors_may_be_in_huge_pages_unless_the_user_switches_them_off(
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
    (policy,) = re.findall(r"\[(\w+)\]", HUGE_PAGES.read_text())
    may_be = {"always": True, "madvise": is_on, "never": False}[policy]
    assert done.stdout.split() == [str(int(may_be))]
