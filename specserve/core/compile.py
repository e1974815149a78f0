"""Compiled kernels: numba without the interpreter lock, kept on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles ``function`` at its first call; other threads run meanwhile and during each call.

    The machine code is cached beside the source or in numba's user folder. Numba notices a change
    of the function's own file only, so a kernel calls nothing compiled from other files.
    """
    try:
        return njit(nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        # A read-only installation without a home folder has no place for the cache.
        return njit(nogil=True)(function)  # type: ignore[no-any-return]
