from __future__ import annotations

import subprocess
import sys

LEFT = """
import sys
from numba.core.dispatcher import Dispatcher
from specserve.core.compile import _Cache
from specserve.policy.compile_kernels import compile_kernels

compile_kernels()
kernels = {
    value
    for module in list(sys.modules.values())
    if module.__name__.startswith("specserve.")
    for value in vars(module).values()
    if isinstance(value, Dispatcher) and isinstance(value._cache, _Cache)
}
print(len(kernels), *(each.py_func.__name__ for each in kernels if not each.signatures))
"""
"""Prints the number of kernels, and the names of those that are not compiled."""

PARTS = {"costs_of", "doubt_about"}
"""Kernels that are called by other kernels: read from the cache, they are within these."""


def test_no_kernel_is_left_for_the_start_of_a_replica() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT], capture_output=True, text=True, check=True, timeout=300
    )
    number, *left = done.stdout.split()
    assert int(number) > 10
    assert set(left) <= PARTS
