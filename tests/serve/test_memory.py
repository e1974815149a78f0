"""The memory routes, with a real store in this process and a replica's middleware."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Scope

from specserve.core.config import parse
from specserve.core.errors import SnapshotError, StoreError
from specserve.engine.tenant_memory import TenantMemory
from specserve.serve import bodies, memory
from specserve.serve.controls import ControlsMiddleware
from specserve.serve.memory import (
    BURST_S,
    BYTES_PER_S,
    CALL_BYTES,
    LINE_BYTES,
    MAX_BODY_BYTES,
    MAX_LINES,
    MemoryApi,
    Turns,
)
from specserve.serve.middleware import RetryAfterMiddleware, answer_http_error
from specserve.serve.tenants import TenantMiddleware, read_keys
from specserve.trie.namespaces import namespace
from specserve.trie.records import ExchangeReply, ExchangeRequest
from specserve.trie.store import StoreOptions, TrieStore

PATH = "/v1/speculation/memory"
MAX_TOKENS = 50
BEGIN = 1
KEYS = [{"env": "A", "tenant": "team-a"}, {"env": "B", "tenant": "team-b"}]
A, B = ({"Authorization": f"Bearer {key}"} for key in ("key-a", "key-b"))
OWN = {name: namespace("model", tenant=name) for name in ("team-a", "team-b")}


class Tokenizer:
    """One token for each character, and a first token before a prompt."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BEGIN] * add_special_tokens + [ord(each) % 1000 for each in text]


class Store:
    """The model's store, and a client of it. It answers while ``is_up`` is set."""

    def __init__(self) -> None:
        self.options = StoreOptions(fingerprint="model", vocab_size=1000)
        self.is_up = True
        self._store = TrieStore(self.options)

    def find(self, name: str) -> TrieStore:
        assert name == self.options.name
        if not self.is_up:
            raise StoreError("no answer within 10 s")
        return self._store

    def exchange(self, request: ExchangeRequest, timeout_s: float = 0.0) -> ExchangeReply:
        return self.find(self.options.name).exchange(request)

    def tokens(self) -> dict[str, int]:
        """Tokens of each namespace."""
        return self._store.stats().tokens_by_namespace

    def texts(self, name: str) -> list[list[int]]:
        """The texts of a namespace that a new replica gets."""
        records = self.exchange(ExchangeRequest("replica", "", 0, [], 1 << 30)).records
        return [each.token_array().tolist() for each in records if each.namespace == name]


class Clock:
    """A clock that only the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def application(
    store: Store, clock: Clock, keys: list[dict[str, str]] = KEYS, **args: Any
) -> ASGIApp:
    http = {"api_keys": keys, **args.pop("http", {})}
    config = parse({"model": {"path": "m"}, "speculation": [{"kind": "trie"}], "http": http} | args)
    api = MemoryApi(
        config,
        lambda: TenantMemory(
            store.options,
            Tokenizer(),
            MAX_TOKENS,
            2 * MAX_TOKENS,
            lambda: ["an-adapter"],
            lambda _: store,
            store.find,
        ),
        Turns(clock),
    )
    app = FastAPI(exception_handlers={HTTPException: answer_http_error})
    app.include_router(api.router())
    wrapped: ASGIApp = ControlsMiddleware(app, ["trie"])
    known = read_keys(config.http.api_keys, {"A": "key-a", "B": "key-b"})
    if known:
        wrapped = TenantMiddleware(wrapped, known)
    return RetryAfterMiddleware(wrapped, 7)


@pytest.fixture
def client(store: Store, clock: Clock) -> TestClient:
    return TestClient(application(store, clock), headers=A)


def lines(*values: object) -> bytes:
    return b"\n".join(json.dumps(each).encode() for each in values)


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == status
    return error


def test_each_form_of_a_line_is_tokenized_like_a_request_and_counted(
    client: TestClient, store: Store
) -> None:
    body = lines({"text": "ab"}, {"prompt": "c", "completion": "d"}, {"token_ids": [5, 6, 7]})
    answer = client.post(PATH, content=body + b"\n\n")
    assert answer.json() == {
        "object": "speculation.memory",
        "model": "m",
        "lines": 3,
        "tokens": 2 + 3 + 3,
    }
    expected = [[97, 98], [BEGIN, 99, 100], [5, 6, 7]]
    assert store.texts(OWN["team-a"]) == expected


def test_a_tenant_sees_and_deletes_only_its_own_texts(
    client: TestClient, store: Store, clock: Clock
) -> None:
    client.post(PATH, content=lines({"text": "aaa"}))
    client.post(PATH, content=lines({"text": "bb"}), headers=B)
    clock.now += 1
    client.post(PATH, params={"adapter": "an-adapter"}, content=lines({"text": "c"}))
    answer = client.get(PATH)
    assert answer.headers["Cache-Control"] == "no-store"
    adapted = namespace("model", "an-adapter", "team-a")
    assert answer.json()["tokens"] == 4
    rows = {each["namespace"]: each for each in answer.json()["namespaces"]}
    assert rows == {
        OWN["team-a"]: {"namespace": OWN["team-a"], "adapter": "", "tokens": 3},
        adapted: {"namespace": adapted, "adapter": "an-adapter", "tokens": 1},
    }
    assert client.delete(PATH).json()["forgotten_tokens"] == 4
    assert store.tokens() == {OWN["team-b"]: 2}
    assert client.get(PATH, headers=B).json()["tokens"] == 2


@pytest.mark.parametrize("problem", [SnapshotError, StoreError])
def test_a_purge_that_fails_is_a_503(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, problem: type[Exception]
) -> None:
    def purge(self: TrieStore, namespace: str) -> int:
        raise problem("disk full")

    monkeypatch.setattr(TrieStore, "purge", purge)
    assert "disk full" in error_of(client.delete(PATH), 503)["message"]


@pytest.mark.parametrize(
    ("wrong", "field", "message"),
    [
        (b"{", "line 2: line", "'{' is not allowed; allowed: valid JSON"),
        (b'{"text": 1}', "line 2: text", "1 is not allowed; allowed: a text that is not empty"),
        (b'{"token_ids": [1000]}', "line 2: token_ids.0", "1000 is not allowed; allowed: an int"),
        (lines({"text": "a" * 51}), "line 2", "'51 tokens' is not allowed; allowed: at most 50"),
        (lines({"text": "a" * 101}), "line 2", "'101 characters' is not allowed; allowed: at m"),
    ],
)
def test_an_invalid_line_is_refused_and_nothing_is_stored(
    client: TestClient, store: Store, wrong: bytes, field: str, message: str
) -> None:
    body = lines({"text": "a"}) + b"\n" + wrong + b"\n" + lines({"text": "b"})
    error = error_of(client.post(PATH, content=body), 400)
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: {message}")
    assert store.tokens() == {}


@pytest.mark.parametrize("body", [b"", b"\n \n", b"\x00" * 100, bytes(range(256)), b"null"])
def test_garbage_is_refused(client: TestClient, store: Store, body: bytes) -> None:
    error_of(client.post(PATH, content=body), 400)
    assert store.tokens() == {}


def test_a_body_over_a_limit_is_refused_with_the_limit(
    client: TestClient, store: Store, clock: Clock
) -> None:
    error = error_of(client.post(PATH, content=b"x" * (MAX_BODY_BYTES + 1)), 413)
    assert str(MAX_BODY_BYTES) in error["message"]
    clock.now += 3600
    many = lines(*([{"text": "a"}] * MAX_LINES))
    error = error_of(client.post(PATH, content=many + b"\n" + lines({"text": "b"})), 413)
    assert str(MAX_LINES) in error["message"]
    assert store.tokens() == {}
    clock.now += 3600
    assert client.post(PATH, content=many).json()["lines"] == MAX_LINES


@pytest.mark.parametrize(
    ("next_messages", "status"), [([{"type": "http.disconnect"}], 499), ([], 408)]
)
def test_nothing_is_stored_from_an_incomplete_body(
    store: Store,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    next_messages: list[Message],
    status: int,
) -> None:
    monkeypatch.setattr(bodies, "BODY_PAUSE_S", 0.01)
    whole = lines({"text": "a"}) + b"\n"
    coming = [{"type": "http.request", "body": whole, "more_body": True}, *next_messages]
    sent: list[Message] = []
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer key-a")],
    }

    async def receive() -> Message:
        return coming.pop(0) if coming else await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        await application(store, clock)(scope, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == status
    assert store.tokens() == {}


def test_a_call_keeps_its_turn_until_its_texts_are_written(clock: Clock) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    class SlowStores(Store):
        def find(self, name: str) -> TrieStore:
            has_begun.set()
            may_end.wait(60)
            return super().find(name)

    async def run() -> int:
        transport = httpx.ASGITransport(application(SlowStores(), clock))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=A) as http:
            first = asyncio.create_task(http.post(PATH, content=lines({"text": "a"})))
            await asyncio.to_thread(has_begun.wait, 60)
            first.cancel()
            second = await http.post(PATH, content=lines({"text": "b"}))
            may_end.set()
            await asyncio.wait([first])
            return second.status_code

    assert asyncio.run(run()) == 429


def test_a_tenant_over_its_rate_gets_429_with_retry_after(
    client: TestClient, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "BYTES_PER_S", 1 << 10)
    body = lines({"text": "a"}).ljust((16 << 10) - LINE_BYTES)
    assert client.post(PATH, content=body).status_code == 200
    clock.now += 0.5
    refused = client.post(PATH, content=body)
    message = error_of(refused, 429)["message"]
    assert "at most 1024 bytes a second, and each call counts 16384 more" in message
    assert "try again in 29.5 s" in message
    assert refused.headers.get_list("Retry-After") == ["30"]
    assert client.post(PATH, content=body, headers=B).status_code == 200
    assert client.delete(PATH).status_code == 200  # a tenant can still delete
    clock.now += 30
    assert client.post(PATH, content=body).status_code == 200


def test_a_tenant_deletes_about_once_a_second(client: TestClient, clock: Clock) -> None:
    statuses = []
    for _ in range(20):
        statuses.append(client.delete(PATH).status_code)
        clock.now += 0.5
    assert statuses.count(200) == pytest.approx(12, abs=1)


def test_a_burst_of_small_calls_is_allowed(client: TestClient) -> None:
    statuses = [client.get(PATH).status_code for _ in range(30)]
    num_free = statuses.index(429)
    assert statuses == [200] * num_free + [429] * (30 - num_free)
    assert num_free == BURST_S * BYTES_PER_S / CALL_BYTES + 1


def test_each_tenant_has_one_call_at_a_time(store: Store, clock: Clock) -> None:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(application(store, clock))
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            body = lines({"text": "abc"})
            calls = [client.post(PATH, content=body, headers=each) for each in [A, B] * 10]
            return await asyncio.gather(*calls)

    answers = asyncio.run(run())
    assert sorted(each.status_code for each in answers) == [200] * 2 + [429] * 18
    late = next(each for each in answers if each.status_code == 429)
    assert late.headers["Retry-After"] == "7"
    assert store.tokens() == dict.fromkeys(OWN.values(), 3)


def test_calls_get_503_while_the_stores_do_not_answer(
    client: TestClient, store: Store, clock: Clock
) -> None:
    client.post(PATH, content=lines({"text": "abc"}))
    clock.now += 1
    store.is_up = False
    for method in ("POST", "GET", "DELETE"):
        answer = client.request(method, PATH, content=lines({"text": "d"}))
        assert "the draft memory: no answer within 10 s" in error_of(answer, 503)["message"]
        assert answer.headers["Retry-After"] == "7"
    store.is_up = True
    clock.now += 1
    assert client.get(PATH).json()["tokens"] == 3


@pytest.mark.parametrize(
    ("method", "params", "allowed"),
    [
        ("POST", {"tenant": "team-b"}, "adapter; the API key tells the tenant"),
        ("POST", {"adapter": "another"}, "an-adapter"),
        ("DELETE", {"adapter": "an-adapter"}, "none; the API key tells the tenant"),
    ],
)
def test_a_query_may_only_name_the_adapter_of_new_texts(
    client: TestClient, store: Store, method: str, params: dict[str, str], allowed: str
) -> None:
    answer = client.request(method, PATH, params=params, content=lines({"text": "a"}))
    assert error_of(answer, 400)["message"].endswith(f"allowed: {allowed}")
    assert store.tokens() == {}


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        ({"keys": []}, 403, "`http.memory_api` is `with_api_keys`: `always` switches this on"),
        ({"http": {"memory_api": "never"}}, 403, "`http.memory_api` is `never`"),
        ({"speculation": [{"kind": "ngram"}]}, 404, "speculation: ['ngram'] is not allowed"),
        (
            {"speculation": [{"kind": "trie", "share": "replica"}]},
            404,
            "speculation.0.share: 'replica' is not allowed; allowed: cluster",
        ),
    ],
)
def test_the_answer_of_a_disabled_api_names_the_field(
    store: Store, clock: Clock, method: str, args: dict[str, Any], status: int, message: str
) -> None:
    client = TestClient(application(store, clock, **args), headers=A)
    answer = client.request(method, PATH, content=lines({"text": "a"}))
    assert message in error_of(answer, status)["message"]
    assert store.tokens() == {}


def test_without_keys_the_api_can_be_enabled_for_the_whole_memory(
    store: Store, clock: Clock
) -> None:
    app = application(store, clock, keys=[], http={"memory_api": "always"})
    client = TestClient(app)
    assert client.post(PATH, content=lines({"text": "abc"})).status_code == 200
    assert store.tokens() == {namespace("model"): 3}
    assert client.delete(PATH).json()["forgotten_tokens"] == 3


def test_tenants_can_fill_but_not_delete_a_shared_memory(store: Store, clock: Clock) -> None:
    shared = [{"kind": "trie", "share_tenants": True}]
    client = TestClient(application(store, clock, speculation=shared), headers=A)
    assert client.post(PATH, content=lines({"text": "abc"})).status_code == 200
    assert client.get(PATH, headers=B).json()["tokens"] == 3
    assert "share_tenants" in error_of(client.delete(PATH), 403)["message"]
    assert store.tokens() == {namespace("model"): 3}
