"""A headless Chromium, driven over its own DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from tests.integration.cluster import eventually

CHROMIUM = shutil.which("chromium")
ANSWER_S = 30.0


class Page:
    """A tab.

    Args:
        socket: connection to its DevTools.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._num_calls = 0
        self.requested: list[str] = []
        """URLs that the page requested."""
        self.errors: list[str] = []
        """Errors that the page logged, and its uncaught exceptions."""
        for domain in ("Network", "Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and records the events that arrive meanwhile."""
        self._num_calls += 1
        call = {"id": self._num_calls, "method": method, "params": parameters}
        self._socket.send(json.dumps(call))
        while True:
            message = json.loads(self._socket.recv(timeout=ANSWER_S))
            if message.get("id") == self._num_calls:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self._note(message.get("method"), message.get("params", {}))

    def open(self, url: str) -> None:
        """Opens a URL, and waits until the page has loaded."""
        self.call("Page.navigate", url=url)
        self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression. A promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Waits until an expression is true, and returns its value."""

        def message() -> str:
            shown = self.run("document.body?.innerText")
            return f"{expression}\nerrors: {self.errors}\nthe page shows:\n{shown}"

        return eventually(lambda: self.run(expression), message, timeout_s)

    def look(self, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Sets the window's size in CSS pixels, and ``prefers-color-scheme``."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
        scheme_wanted = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[scheme_wanted])

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def _note(self, event: str | None, details: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requested.append(details["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(details["exceptionDetails"])[:500])
        elif event == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.errors.append(details["entry"]["text"])


@contextmanager
def browsing() -> Iterator[Page]:
    """An empty tab of a browser, for the length of a block."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="ss", ignore_cleanup_errors=True) as profile:
        # Chromium has no sandbox for root, and a container's /dev/shm may be small.
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--no-first-run", "--disable-background-networking", "--disable-extensions"]
        options += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [CHROMIUM, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": profile, "XDG_CACHE_HOME": profile},
        )
        try:
            port_file = Path(profile, "DevToolsActivePort")
            port = eventually(
                lambda: port_file.exists() and port_file.read_text().split("\n")[0],
                "Chromium listens",
                60,
            )

            def find_tab() -> dict[str, Any] | None:
                tabs = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=60).json()
                return next((each for each in tabs if each["type"] == "page"), None)

            tab = eventually(find_tab, "a tab", 60)
            # Messages are read only during a call, so a pong would come too late.
            with connect(
                tab["webSocketDebuggerUrl"], max_size=None, ping_interval=None, open_timeout=60
            ) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            process.wait(30)
