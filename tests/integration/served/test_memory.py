"""The draft memory over HTTP: a tenant's texts give drafts to that tenant only."""

from __future__ import annotations

import json
import random
import socket
import string
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest

from specserve.serve.memory import MAX_BODY_BYTES
from tests.integration.api import MODEL, TIMEOUT_S, Api, fresh
from tests.integration.applications import KEYS
from tests.integration.cluster import Deployment, suspend

pytestmark = pytest.mark.timeout(900)

PATH = "/v1/speculation/memory"
A, B = ({"Authorization": f"Bearer {key}"} for key in list(KEYS.values())[:2])


class Memory:
    """A client of the draft memory. Calls that are rate limited are repeated."""

    def __init__(self, app: Deployment) -> None:
        self.app = app
        self.base_url = app.base_url("/team")
        self.http = httpx.Client(base_url=self.base_url, timeout=TIMEOUT_S)
        self.asked_at = 0.0  # when the last call was sent, after the waits for its rate

    def call(self, method: str, key: Mapping[str, str], body: bytes = b"") -> httpx.Response:
        def in_time() -> httpx.Response | None:
            self.asked_at = time.perf_counter()
            answer = self.http.request(method, PATH, headers=dict(key), content=body)
            assert answer.status_code != 429 or answer.headers["Retry-After"]
            return answer if answer.status_code != 429 else None

        return self.app.eventually(in_time, "an answer other than 429", 60)

    def ask(self, method: str, key: Mapping[str, str], *lines: object) -> dict[str, Any]:
        answer = self.call(method, key, "\n".join(map(json.dumps, lines)).encode())
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def held(self, key: Mapping[str, str]) -> int:
        """Number of a tenant's tokens in the stores."""
        return int(self.ask("GET", key)["tokens"])

    def teach(self, key: Mapping[str, str], *lines: object) -> int:
        """Teaches texts, waits until the replica has them, and returns the number of tokens."""
        before = self.in_replica()
        result = self.ask("POST", key, *lines)
        assert result["lines"] == len(lines)
        num_tokens = int(result["tokens"])
        self.app.eventually(
            lambda: self.in_replica() >= before + num_tokens, "the replica has the texts", 60
        )
        return num_tokens

    def in_replica(self) -> float:
        """Number of tokens that the replica's tries have learned so far."""
        name = "specserve_trie_ingested_tokens_total{"
        lines = fresh(self.http, "/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def complete(self, key: Mapping[str, str], prompt: str) -> tuple[list[int], int]:
        """A prompt with its answer, and the number of accepted draft tokens. It is not learned.

        All answers have the same length. The penalties prevent repetition, which would give drafts
        without a memory.
        """
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 64}
        body |= {"min_tokens": 64, "frequency_penalty": 2, "presence_penalty": 2}
        body |= {"return_token_ids": True, "vllm_xargs": {"learn": 0}}
        before = self.num_accepted(key)
        answer = self.http.post("/v1/completions", headers=dict(key), json=body)
        assert answer.status_code == 200, answer.text
        best = answer.json()["choices"][0]
        return best["prompt_token_ids"] + best["token_ids"], self.num_accepted(key) - before

    def num_accepted(self, key: Mapping[str, str]) -> int:
        sources = fresh(self.http, "/v1/speculation", key).json()["acceptance"].values()
        return sum(int(each["accepted_tokens"]) for each in sources)


@pytest.fixture
def memory(shared: Deployment) -> Iterator[Memory]:
    memory = Memory(shared)
    with memory.http:
        yield memory


def some_text() -> str:
    return "".join(random.choices(string.ascii_lowercase + " ", k=300))


def test_a_taught_text_gives_drafts_to_its_own_tenant_only(
    memory: Memory,
) -> None:
    prompt = some_text()
    written, by_itself = memory.complete(A, prompt)
    of_b = memory.complete(B, prompt)  # B's memory may hold similar texts
    memory.teach(A, {"token_ids": written})
    assert memory.complete(B, prompt) == of_b
    assert of_b[0] == written
    again, num_accepted = memory.complete(A, prompt)
    assert again == written
    assert num_accepted > by_itself + 10


@pytest.mark.parametrize("xargs", [{}, {"beam_sample": 1}, {"learn": 0}])
def test_the_best_beam_is_learned_unless_the_request_forbids_it(
    memory: Memory, xargs: dict[str, int]
) -> None:
    body = {"model": MODEL, "prompt": some_text(), "use_beam_search": True, "n": 3}
    body |= {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "vllm_xargs": xargs}
    before = memory.in_replica(), memory.held(B)
    answer = memory.http.post("/v1/completions", headers=dict(B), json=body)
    assert answer.status_code == 200, answer.text
    best = answer.json()["choices"][0]
    size = len(best["prompt_token_ids"]) + len(best["token_ids"])
    more = size if xargs.get("learn", 1) else 0
    assert memory.in_replica() == before[0] + more
    memory.app.eventually(
        lambda: memory.held(B) == before[1] + more, "the store has the text as well", 60
    )


def test_a_tenant_clears_only_its_own_memory(memory: Memory) -> None:
    memory.ask("DELETE", A)
    prompt = some_text()
    written, by_itself = memory.complete(A, prompt)
    line = {"token_ids": written}
    before = memory.held(B)
    num_tokens = memory.teach(A, line)
    assert memory.teach(B, line) == num_tokens
    assert memory.held(A) == num_tokens
    assert memory.ask("DELETE", A)["forgotten_tokens"] == num_tokens
    assert memory.held(A) == 0
    assert memory.held(B) == before + num_tokens
    memory.app.eventually(
        lambda: memory.complete(A, prompt) == (written, by_itself), "the replica forgets it", 30
    )
    assert memory.complete(B, prompt)[1] > by_itself + 10


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"\x1f\x8b\x08\x00" + bytes(range(256)), "line 1: line"),
        (b'{"text": "a"}\n{"text": ""}', "line 2: text"),
        (b'{"text": "a"}\n{"token_ids": [1, 4096]}', "line 2: token_ids.1"),
        (b'{"text": "a"}\n{"text": "' + b"a b " * 4096 + b'"}', "line 2"),
    ],
    ids=["empty", "gzip", "empty text", "token", "long"],
)
def test_an_invalid_line_is_reported_and_nothing_is_taught(
    memory: Memory, body: bytes, param: str
) -> None:
    before = memory.held(B)
    answer = memory.call("POST", B, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert memory.held(B) == before


def test_a_too_large_body_is_refused_and_rate_limited(memory: Memory) -> None:
    body = b'{"text": "a"}\n' * (MAX_BODY_BYTES // 14 + 1)
    answer = memory.call("POST", B, body)
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]
    early = memory.http.post(PATH, headers=B, content=b'{"text": "a"}')
    assert early.status_code == 429
    assert int(early.headers["Retry-After"]) > 10


def test_a_body_that_is_cut_off_in_the_middle_teaches_nothing(memory: Memory) -> None:
    before = memory.held(A)
    url = httpx.URL(memory.base_url)
    line = b'{"text": "a b c"}\n'
    head = (
        f"POST {url.path.rstrip('/')}{PATH} HTTP/1.1\r\nHost: {url.host}\r\n"
        f"Authorization: {A['Authorization']}\r\nContent-Length: {2 * len(line)}\r\n\r\n"
    )
    for body in (line, line + line[:7]):
        with socket.create_connection((url.host, url.port), TIMEOUT_S) as connection:
            connection.sendall(head.encode() + body)
    assert memory.held(A) == before
    num_tokens = memory.teach(A, {"text": "a b c"})  # runs after the calls have ended
    assert memory.held(A) == before + num_tokens


def test_many_clients_at_once_get_200_or_429_with_retry_after(memory: Memory) -> None:
    prompt = some_text()
    written, _ = memory.complete(B, prompt)
    before = memory.held(A)
    lines = b"\n".join(json.dumps({"text": some_text()}).encode() for _ in range(20))

    def post() -> httpx.Response:
        return memory.http.post(PATH, headers=A, content=lines)

    with ThreadPoolExecutor(32) as pool:
        posts = [pool.submit(post) for _ in range(32)]
        assert memory.complete(B, prompt)[0] == written
    answers = [each.result() for each in posts]
    assert {each.status_code for each in answers} == {200, 429}
    assert all(each.headers["Retry-After"] for each in answers if each.status_code == 429)
    taught = sum(each.json()["tokens"] for each in answers if each.status_code == 200)
    assert memory.held(A) == before + taught


def pauses_while_teaching(memory: Memory) -> tuple[list[float], float]:
    """Pauses between the parts of streams while texts are taught, and how long that took."""
    body = {"model": MODEL, "prompt": some_text(), "max_tokens": 1500, "stream": True}
    body |= {"ignore_eos": True, "vllm_xargs": {"learn": 0}}
    came: list[list[float]] = []  # arrival times of the parts of each stream
    is_streaming, is_taught = threading.Event(), threading.Event()

    def stream() -> None:
        while not is_taught.is_set():
            came.append([])
            with memory.http.stream("POST", "/v1/completions", headers=B, json=body) as answer:
                assert answer.status_code == 200, answer.read()
                for _ in answer.iter_bytes():
                    came[-1].append(time.perf_counter())
                    is_streaming.set()

    lines = [{"text": f"def total_{n}({some_text()}):\n    return {n}\n"} for n in range(4000)]
    with ThreadPoolExecutor(1) as pool:
        streams = pool.submit(stream)
        try:
            assert is_streaming.wait(TIMEOUT_S)
            memory.teach(A, *lines)
            began, ended = memory.asked_at, time.perf_counter()
        finally:
            is_taught.set()
        streams.result(TIMEOUT_S)
    pauses = [
        min(late, ended) - max(early, began)
        for times in came
        for early, late in pairwise(times)
        if early < ended and late > began
    ]
    return pauses, ended - began


def test_decoding_goes_on_while_thousands_of_lines_are_taught(memory: Memory) -> None:
    for _ in range(3):  # a busy machine may stand still for a second
        pauses, seconds = pauses_while_teaching(memory)
        # The limit is relative, because both times grow on a busy machine.
        if len(pauses) > 20 and max(pauses) < seconds / 2:
            return
    raise AssertionError(f"pauses of {pauses} s within {seconds} s")


def test_memory_calls_get_503_while_the_store_hangs(memory: Memory, shared: Deployment) -> None:
    before = memory.held(A)
    hanging = shared.cluster.processes("ray::TrieStore")
    assert hanging
    for store in hanging:
        suspend(store)
    try:
        bodies = {"POST": b'{"text": "a b c"}', "GET": b"", "DELETE": b""}
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda each: memory.call(each[0], A, each[1]), bodies.items()))
    finally:
        for store in hanging:
            store.resume()
    for answer in answers:
        assert answer.status_code == 503
        assert "the draft memory: no answer within 10 s" in answer.json()["error"]["message"]
    assert memory.held(A) == before


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_without_api_keys_the_error_names_the_field_that_enables_it(api: Api, method: str) -> None:
    answer = api.http.request(method, PATH, content=b'{"text": "a"}')
    assert answer.status_code == 403
    assert "`http.memory_api`" in answer.json()["error"]["message"]
