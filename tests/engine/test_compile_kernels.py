from __future__ import annotations

import subprocess
import sys

LEFT = """
import sys
from numba.core.dispatcher import Dispatcher
from specserve.core.compile import _Cache
from specserve.engine.compile_kernels import compile_kernels

compile_kernels()
compiled = {
    value
    for module in list(sys.modules.values())
    if module.__name__.startswith("specserve.")
    for value in vars(module).values()
    if isinstance(value, Dispatcher)
}
kernels = {each for each in compiled if isinstance(each._cache, _Cache)}
# A kernel read from the cache includes the kernels that it calls.
parts = {name for each in compiled for name in each.py_func.__code__.co_names}
left = {each.py_func.__name__ for each in kernels if not each.signatures}
print(len(kernels), *(left - parts))
"""
"""Prints the number of kernels and the names of those that are not compiled."""


def test_compile_kernels_compiles_every_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT], capture_output=True, text=True, check=True, timeout=300
    )
    number, *left = done.stdout.split()
    assert int(number) > 10
    assert left == []
