"""Shows a run's progress: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_EVERY_S = 20.0
SMOOTHING = 0.95


class Progress:
    """Shows smoothed numbers of a run; a context manager around the training loop."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._smooth: dict[str, float] = {}
        self._last_line = 0.0
        self._rate: tuple[float, int] | None = None
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            disable=not sys.stdout.isatty(),
        )
        self._task = self._bar.add_task(title, total=1.0, numbers="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: float, step: int, tokens: int, numbers: dict[str, float]) -> None:
        """Adds one step's numbers and shows progress; `done` is the finished share, 0..1."""
        for name, value in numbers.items():
            before = self._smooth.get(name, value)
            self._smooth[name] = SMOOTHING * before + (1 - SMOOTHING) * value
        now = time.monotonic()
        if self._rate is None:
            self._rate = (now, tokens)
        shown = " ".join(f"{name} {value:.3f}" for name, value in self._smooth.items())
        shown = f"step {step} tokens {tokens / 1e6:.2f} M {shown}"
        self._bar.update(self._task, completed=done, numbers=shown)
        if self._bar.disable and (now - self._last_line >= LINE_EVERY_S or done >= 1):
            since, before_tokens = self._rate
            rate = (tokens - before_tokens) / max(now - since, 1e-9)
            print(f"{self._title} {done:6.1%} {shown} {rate:.0f} tokens/s", flush=True)
            self._last_line, self._rate = now, (now, tokens)
