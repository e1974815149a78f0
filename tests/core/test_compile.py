"""The disk cache of kernels, with a small package whose sources change."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from specserve.core.compile import direct, kernel
from specserve.core.types import Int32Array

HELPER = """
from numba import njit
from .constants import FACTOR

@njit(inline="{inline}")
def scaled(value):
    return {sign} * FACTOR * value
"""
KERNEL = """
from specserve.core.compile import kernel
from .helper import scaled

@kernel
def double(value):
    return scaled(value) + scaled(value)
"""


class Package:
    """A kernel whose helper and constant are in other files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.write("__init__", "")
        self.write("constants", "FACTOR = 1\n")
        self.write("kernels", KERNEL)

    def write(self, module: str, content: str) -> None:
        (self._folder / f"{module}.py").write_text(content)

    def load(self) -> Any:
        """The kernel as a new process loads it."""
        for name in [each for each in sys.modules if each.split(".")[0] == self._folder.name]:
            del sys.modules[name]
        importlib.invalidate_caches()
        return importlib.import_module(f"{self._folder.name}.kernels").double


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # its check misses quick changes
    return Package(tmp_path / "compiled_here")


@pytest.mark.parametrize("inline", ["never", "always"])
def test_a_kernel_is_cached_until_its_sources_change(package: Package, inline: str) -> None:
    package.write("helper", HELPER.format(inline=inline, sign=1))
    assert package.load()(3) == 6
    package.write("constants", "FACTOR = 1\nOTHER = 5\n")
    package.write("helper", HELPER.format(inline=inline, sign=1))  # the same, but newer
    kept = package.load()
    assert kept(3) == 6
    assert sum(kept.stats.cache_hits.values()) == 1

    package.write("helper", HELPER.format(inline=inline, sign=-1))
    assert package.load()(3) == -6
    package.write("constants", "FACTOR = 2\n")
    assert package.load()(3) == -12


class Counters(NamedTuple):
    counts: Int32Array


@kernel
def count(counters: Counters, slot: int) -> int:
    counters.counts[slot] += 1
    return len(counters.counts)


def test_compiled_code_takes_the_kernels_arguments() -> None:
    counters = Counters(np.zeros(3, np.int32))
    code = direct(count, counters, 0)
    assert code(counters, np.int32(2)) == 3
    assert counters.counts.tolist() == [0, 0, 1]


@pytest.mark.parametrize("counts", [np.zeros(3, np.int64), np.zeros((3, 2), np.int32)[:, 0]])
def test_in_tests_compiled_code_refuses_other_arrays(counts: Any) -> None:
    code = direct(count, Counters(np.zeros(3, np.int32)), 0)
    with pytest.raises(AssertionError, match="count takes Counters"):
        code(Counters(counts), 0)
