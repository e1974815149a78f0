"""Writes spans of a process's work to a file, for :mod:`tests.peers.traced`.

The engine core's process imports this module early. Later vLLM inspects every imported module, and
numba's libraries break that. So this module must not import the sources.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUFFIX = ".spans"
_MAX_LINES = 50
_lines: list[str] = []
_lock = threading.Lock()


def note(name: str, started_ns: int) -> None:
    """Writes a span that ends now. All processes of a machine share the clock."""
    ended_ns = time.monotonic_ns()
    with _lock:
        _lines.append(json.dumps((name, _row(), started_ns, ended_ns)))
        if len(_lines) >= _MAX_LINES:
            path = Path(os.environ["RAY_TMPDIR"], f"{os.getpid()}{SUFFIX}")
            with path.open("a") as file:
                file.writelines(f"{line}\n" for line in _lines)
            _lines.clear()


def _row() -> str:
    """The row of the span in its process. Spans of one task or thread are nested."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return threading.current_thread().name if task is None else task.get_name()


def wrap(owner: Any, method: str, name: str) -> None:
    """Records every call of a method as a span."""
    original: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(original)
    def spanned(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic_ns()
        try:
            return original(*args, **kwargs)
        finally:
            note(name, started)

    @functools.wraps(original)
    async def spanned_async(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic_ns()
        try:
            return await original(*args, **kwargs)
        finally:
            note(name, started)

    is_async = inspect.iscoroutinefunction(original)
    setattr(owner, method, spanned_async if is_async else spanned)
