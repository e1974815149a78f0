"""The progress bar of a run over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(
    console: Console, name: str, total: int, *, stays: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar, which ``stays`` or vanishes; yields its update(finished requests, tokens)."""
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=not stays) as bars:
        bar = bars.add_task(name, total=total, tokens=0)
        yield lambda done, tokens: bars.update(bar, completed=done, tokens=tokens)
