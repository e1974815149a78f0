"""What a terminal shows while engines load and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specserve.engine.methods import Method


class RichDisplay:
    """Shows a line while an engine loads and a bar while it runs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def loading(self, method: Method) -> Iterator[None]:
        """An engine is starting."""
        with self._console.status(f"{method}: loading the model"):
            yield

    @contextmanager
    def running(self, method: Method, num_prompts: int) -> Iterator[Callable[[int, int], None]]:
        """Prompts are being continued; the value takes finished prompts and tokens so far."""
        columns = (
            TextColumn("{task.description:12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("prompts, {task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as bars:
            bar = bars.add_task(str(method), total=num_prompts, tokens=0)
            yield lambda done, tokens: bars.update(bar, completed=done, tokens=tokens)
