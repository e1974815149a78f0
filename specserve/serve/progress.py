"""Prints the progress of a starting replica; Ray shows the lines at ``serve run``'s terminal."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 5.0


class Progress:
    """Prints the progress of one replica; ``model`` is the model's name in the API."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._started = time.monotonic()

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Prints ``what`` at once and again every ``INTERVAL_S`` seconds, until the block ends."""
        left = threading.Event()

        def repeat() -> None:
            self._say(what)
            while not left.wait(INTERVAL_S):
                self._say(f"still {what}")

        thread = threading.Thread(target=repeat, name="specserve-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()

    def ready(self, url: str) -> None:
        """Prints the URL of the API, and a command to try it."""
        body = json.dumps({"model": self._model, "prompt": "def fibonacci(n):", "max_tokens": 48})
        self._say(f"ready: OpenAI API at {url}/v1")
        self._say(f"try: curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")

    def failed(self, error: Exception) -> None:
        """Prints why the replica does not start, in one line."""
        self._say(f"error: {error}")

    def _say(self, what: str) -> None:
        # Not sys.stdout: Serve redirects it to a log, which may not appear on the terminal.
        assert sys.__stdout__ is not None
        sys.__stdout__.write(f"specserve: [{time.monotonic() - self._started:3.0f} s] {what}\n")
        sys.__stdout__.flush()
