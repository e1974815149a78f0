"""Spans of what a process does, in a file; for :mod:`tests.peers.traced`.

The engine core's process imports this before vLLM looks into every imported module, where it
stumbles over numba's libraries: nothing of the sources may be imported here.
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
_MOST_LINES = 50
_lines: list[str] = []
_lock = threading.Lock()


def note(name: str, started_ns: int) -> None:
    """Writes down a span that ends now; clocks are the same in all processes of a machine."""
    ended_ns = time.monotonic_ns()
    with _lock:
        _lines.append(json.dumps((name, _row(), started_ns, ended_ns)))
        if len(_lines) >= _MOST_LINES:
            path = Path(os.environ["RAY_TMPDIR"], f"{os.getpid()}{SUFFIX}")
            with path.open("a") as file:
                file.writelines(f"{line}\n" for line in _lines)
            _lines.clear()


def _row() -> str:
    """Where in its process the span belongs: spans of one task or thread are within each other."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return threading.current_thread().name if task is None else task.get_name()


def wrap(owner: Any, method: str, name: str) -> None:
    """Has every call of a method be a span."""
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
