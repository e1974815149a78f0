"""Compiled kernels: numba without the interpreter lock, cached on disk if possible."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import is_jitted


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles ``function`` at its first call; other threads run meanwhile and during each call.

    It must not allocate, like :func:`inner`. Each new combination of argument types is compiled,
    for a second or more; :func:`kernel_array` converts arrays from elsewhere to the usual types.

    The machine code is cached beside the source or in numba's user folder. It is compiled anew if
    the source file or a constant of the function, or of a compiled one that it calls, changes.
    """
    compiled = njit(nogil=True, _nrt=False)(function)
    with suppress(RuntimeError):  # a read-only installation without a home folder has no cache
        compiled._cache = _Cache(function)
    return compiled  # type: ignore[no-any-return]


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function into the kernels that call it. It must not allocate, and counts no
    references, so the caller must keep the arrays alive.

    Numba counts a reference at each use of an array in a tuple, by an atomic operation: a lookup in
    the draft memory takes five times as long. Without inlining, each call would copy the tuples.
    """
    compiled: Callable[..., Any] = njit(nogil=True, _nrt=False, forceinline=True)(function)
    return compiled


def vector(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like :func:`inner`, for loops over floats: sums may be reordered, as vector units need.

    It is called and not inlined, so its arguments should be arrays and not tuples.
    """
    compiled: Callable[..., Any] = njit(
        nogil=True, _nrt=False, fastmath={"reassoc", "contract", "arcp", "nsz"}
    )(function)
    return compiled


def direct(function: Callable[..., Any], *arguments: object) -> Callable[..., Any]:
    """A kernel's machine code for arguments of these types, compiled or loaded now. Call it at the
    start, so that no request waits for the compilation.

    A kernel checks the types of all arguments at each call: for 23 arrays in three tuples that
    takes 2.6 us, and the call itself 0.2 us. The machine code checks nothing: with arrays of other
    types or layouts it accesses wrong memory.
    """
    types = tuple(map(function.typeof_pyval, arguments))  # type: ignore[attr-defined]
    code: Callable[..., Any] = function.compile(types)  # type: ignore[attr-defined]
    return code


def kernel_array(array: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """``array`` in the form that kernels take, copied only if it differs from that.

    Numba has separate types for arrays that are read-only (such as those over ``bytes``),
    unaligned, or not contiguous.
    """
    flags = array.flags  # checked first, because `np.require` is slow for a small step
    if array.dtype == dtype and flags.carray:
        return array
    return np.require(array, dtype, ("C", "A", "W"))


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """A cache keyed by all sources; numba's own checks only the time of the function's file."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        name = self._impl.filename_base
        self._cache_file = IndexDataCacheFile(self.cache_path, name, _sources(function))


def _sources(function: Any) -> list[tuple[object, ...]]:
    """All that determines a function's machine code: contents of files, and constants.

    The files' times are left out, because image layers do not keep them.
    """
    sources: list[tuple[object, ...]] = []
    functions = [function]
    for each in functions:  # grows during the loop
        file = Path(each.__code__.co_filename)
        sources.append((str(file), blake2b(file.read_bytes()).digest()))
        for name in each.__code__.co_names:
            value = each.__globals__.get(name)
            if is_jitted(value):
                if value.py_func not in functions:
                    functions.append(value.py_func)
            elif not callable(value) and not isinstance(value, ModuleType):
                sources.append((name, pickle.dumps(value)))
    return sources
