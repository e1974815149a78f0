"""Clients that stream known texts while a test runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx

from tests.integration.api import MODEL, TIMEOUT_S, Api

MAX_TOKENS = 48
_PROMPTS = [
    f"def add_{name}(values):\n    for value in values:\n        total += value\n" * 3
    for name in ("all", "some", "none", "odd", "even", "first", "last", "more")
]


def is_refused(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the server refused a stream because it was full.

    vLLM checks its capacity before it answers 200, and again when it adds the request. A beam
    search may take more places in between, as its steps are not checked.
    """
    return [event.get("error", {}).get("code") for event in events] == [503]


class Streams:
    """Repeats greedy streams and compares each with the same stream on an idle server.

    One more client disconnects after the first piece of each stream.

    Args:
        api: the application.
        num_clients: clients that stream at once.
    """

    def __init__(self, api: Api, num_clients: int) -> None:
        self._api = api
        self._prompts = _PROMPTS[:num_clients]
        self._alone = {prompt: self._text(prompt) for prompt in self._prompts}
        assert None not in self._alone.values(), "the server is busy before it is fuzzed"
        self._is_over = threading.Event()
        self.num_same = dict.fromkeys(self._prompts, 0)
        self.num_left = 0
        self.others: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Streams for the length of a block. A stream that has begun is finished."""
        threads = [threading.Thread(target=self._stream, args=[each]) for each in self._prompts]
        threads.append(threading.Thread(target=self._leave))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join(2 * TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads)

    def _stream(self, prompt: str) -> None:
        while not self._is_over.is_set():
            try:
                tokens = self._text(prompt)
            except Exception as error:
                self.others.append(repr(error))
                continue
            if tokens == self._alone[prompt]:
                self.num_same[prompt] += 1
            elif tokens is not None:
                self.others.append(f"{tokens} for {self._alone[prompt]}")
            else:
                self._is_over.wait(0.1)  # the server is busy

    def _leave(self) -> None:
        while not self._is_over.wait(0.2):
            try:
                with self._begun(self._prompts[0]) as response:
                    next(response.iter_bytes(), None)
                    self.num_left += response.status_code == 200
            except Exception as error:
                self.others.append(f"who leaves: {error!r}")

    def _text(self, prompt: str) -> list[int] | None:
        """The tokens of a stream; None if the server is busy."""
        with self._begun(prompt) as response:
            if response.status_code == 503:
                return None
            response.read()
        assert response.status_code == 200, response.text
        lines = response.text.splitlines()
        assert "data: [DONE]" in lines[-2:], response.text
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        if is_refused(events):
            return None
        assert all("choices" in event for event in events), events
        return [token for event in events for token in event["choices"][0]["token_ids"]]

    def _begun(self, prompt: str) -> AbstractContextManager[httpx.Response]:
        """A stream over a new connection."""
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        url, headers = f"{self._api.base_url}/v1/completions", self._api.http.headers
        return httpx.stream("POST", url, json=body, headers=headers, timeout=TIMEOUT_S)
