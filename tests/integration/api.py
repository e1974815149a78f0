"""A client of a served model, for the tests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families as families

from specserve.serve.shared import AS_OF

MODEL = "demo"
TIMEOUT_S = 120.0
OFF = {"speculation": "off"}
AUTO = {"speculation": "auto"}
REPORT = {"report": 1}


@dataclass(frozen=True)
class Counts:
    """Counts of the verified drafts of one source."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafted_at_position: tuple[int, ...] = ()

    def since(self, earlier: Counts) -> Counts:
        """The difference to earlier counts."""
        before = earlier.drafted_at_position + (0,) * len(self.drafted_at_position)
        return Counts(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            tuple(n - b for n, b in zip(self.drafted_at_position, before, strict=False)),
        )

    @property
    def longest_draft(self) -> int:
        """Length of the longest draft in tokens; 0 without drafts."""
        return sum(number > 0 for number in self.drafted_at_position)


class Api:
    """A client of one application.

    Args:
        base_url: URL of the application, without ``/v1``.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.http = httpx.Client(base_url=base_url, timeout=TIMEOUT_S)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A completion; greedy by default."""
        return self.ask("/v1/completions", **body)

    def chat(self, **body: Any) -> dict[str, Any]:
        """A chat completion; greedy by default."""
        return self.ask("/v1/chat/completions", **body)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Posts a request and returns the answer. Fails unless the status is 200."""
        response = self.http.post(path, json={"model": MODEL, "temperature": 0} | body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @contextmanager
    def streaming(self, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed completion, for the length of a block."""
        body = {"model": MODEL, "temperature": 0, "stream": True} | body
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            yield _events(response)

    def counts(self, label: str = "ngram") -> Counts:
        """Counts of the verified drafts of a source so far."""
        acceptance = self.speculation()["acceptance"].get(label)
        if acceptance is None:
            return Counts()
        return Counts(
            acceptance["drafts"],
            acceptance["draft_tokens"],
            acceptance["accepted_tokens"],
            tuple(acceptance["drafted_at_position"]),
        )

    def speculation(self) -> dict[str, Any]:
        """The current answer of ``GET /v1/speculation``."""
        answer: dict[str, Any] = fresh(self.http, "/v1/speculation").json()
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """Current value of a metric of the replica, summed over the labels that are not given."""
        return sum(
            sample.value
            for family in families(fresh(self.http, "/metrics").text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def fresh(
    http: httpx.Client, path: str, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    """An answer made after this call began. The server may cache answers for one second."""
    asked_at = time.time()
    uncached = {"Cache-Control": "no-cache", **(headers or {})}  # HAProxy caches for a second
    while True:
        response = http.get(path, headers=uncached)
        assert response.status_code == 200, response.text
        if float(response.headers[AS_OF]) >= asked_at:
            return response
        assert time.time() - asked_at < TIMEOUT_S, "the engine does not answer"
        time.sleep(0.05)


def page_data(
    http: httpx.Client, headers: Mapping[str, str] | None = None, **query: int
) -> dict[str, Any]:
    """The data of the page ``/speculation``. While no engine answers in time, it is asked again."""
    asked_at = time.monotonic()
    while True:
        response = http.get("/speculation/data", params=query, headers=headers)
        if response.status_code == 200:
            data: dict[str, Any] = response.json()
            return data
        assert response.status_code == 503, response.text
        assert time.monotonic() - asked_at < TIMEOUT_S, "the engine does not answer"
        time.sleep(0.2)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream up to its end mark. Raises for a stream without one."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise StreamError(line)
            yield event
    raise StreamError("the stream ended without its end mark")


class StreamError(Exception):
    """A stream reported an error or was cut off."""
