"""Compiled kernels: numba without the interpreter lock, kept on disk where that is possible."""

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

    It allocates nothing, as :func:`inner`, and is compiled anew, for a second and more, for
    arguments of other types. Arrays that come from elsewhere go through :func:`kernel_array` first.

    The machine code is cached beside the source or in numba's user folder, until a file changes
    that holds the function or a compiled one that it calls, or a constant in one of them.
    """
    compiled = njit(nogil=True, _nrt=False)(function)
    with suppress(RuntimeError):  # a read-only installation without a home folder has no place
        compiled._cache = _Cache(function)
    return compiled  # type: ignore[no-any-return]


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function into the kernels that call it. It allocates nothing, and counts no
    references.

    Numba counts them wherever an array of a tuple is used, and each time is an atomic operation:
    a lookup in the draft memory takes five times as long with them. The caller keeps the arrays.
    A call of its own would copy all that the tuples hold.
    """
    compiled: Callable[..., Any] = njit(nogil=True, _nrt=False, forceinline=True)(function)
    return compiled


def direct(function: Callable[..., Any], *arguments: object) -> Callable[..., Any]:
    """A kernel's machine code for arguments of these types, compiled or loaded now: where it is
    made at the start, no request waits for that.

    A kernel looks at the types of all that it is given, each time: of 23 arrays in three tuples
    that takes 2.6 us, and the call itself 0.2 us. Here nothing does. With arrays of other types or
    layouts than these the code would read and write where it must not.
    """
    types = tuple(map(function.typeof_pyval, arguments))  # type: ignore[attr-defined]
    code: Callable[..., Any] = function.compile(types)  # type: ignore[attr-defined]
    return code


def kernel_array(array: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """``array`` as kernels take it, copied only where it is otherwise.

    Numba has types of their own for arrays that are read-only, as those over ``bytes`` are,
    unaligned, or not contiguous.
    """
    flags = array.flags  # `np.require` alone would take a good part of a small step's time
    if array.dtype == dtype and flags.carray:
        return array
    return np.require(array, dtype, ("C", "A", "W"))


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Numba's own looks at the time of the function's file, and at nothing else."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        name = self._impl.filename_base
        self._cache_file = IndexDataCacheFile(self.cache_path, name, _sources(function))


def _sources(function: Any) -> list[tuple[object, ...]]:
    """What a function's machine code is made of: contents of files, and constants.

    Not the files' times: an image's layer does not keep them.
    """
    sources: list[tuple[object, ...]] = []
    functions = [function]
    for each in functions:  # which grows
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
