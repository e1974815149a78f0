from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from specserve.core.config import ApiKeyConfig
from specserve.core.errors import ConfigError
from specserve.engine.tenants import CURRENT_TENANT
from specserve.serve.tenants import TenantMiddleware, label_key, read_keys
from specserve.sources.controls import NO_TENANT

VARIABLES = {"A_KEY": "sk-alpha", "A_NEW_KEY": "sk-alpha-2", "B_KEY": "sk-beta"}
CONFIGURED = [
    ApiKeyConfig(env="A_KEY", tenant="team-a"),
    ApiKeyConfig(env="B_KEY", tenant="team-b"),
    ApiKeyConfig(env="A_NEW_KEY", tenant="team-a"),
]


async def answer_tenant(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the current tenant, from another task."""

    async def answer() -> None:
        body = CURRENT_TENANT.get().encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    await asyncio.create_task(answer())


KEYS = read_keys(CONFIGURED, VARIABLES)
APPLICATION = TenantMiddleware(answer_tenant, KEYS)


@pytest.fixture
def client() -> TestClient:
    return TestClient(APPLICATION)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_label_key_depends_on_all_api_keys_in_any_order() -> None:
    first, *others = KEYS.items()
    assert label_key(KEYS) == label_key(dict([*others, first]))
    assert len({label_key(KEYS), label_key(dict([first])), label_key(dict(others))}) == 3
    assert label_key({}) == b""


@pytest.mark.parametrize(
    ("key", "tenant"), [("sk-alpha", "team-a"), ("sk-alpha-2", "team-a"), ("sk-beta", "team-b")]
)
def test_a_known_key_identifies_the_tenant(client: TestClient, key: str, tenant: str) -> None:
    answer = client.post("/v1/completions", headers=bearer(key))
    assert (answer.status_code, answer.text) == (200, tenant)


def test_the_authorization_scheme_ignores_case(client: TestClient) -> None:
    headers = {"authorization": "bearer sk-beta"}
    assert client.post("/v1/completions", headers=headers).text == "team-b"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("sk-alph"),
        bearer("sk-alphaa"),
        bearer("SK-ALPHA"),
        bearer("sk-alpha,sk-beta"),
        {"Authorization": "sk-alpha"},
        {"Authorization": "Basic sk-alpha"},
        {"X-Api-Key": "sk-alpha"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate", "/docs", "/healthz"])
def test_without_a_known_key_the_answer_is_401_in_openais_form(
    client: TestClient, headers: dict[str, str], path: str
) -> None:
    answer = client.post(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error["code"] == "invalid_api_key"
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("GET", "/metrics"), ("GET", "/metrics/"), ("OPTIONS", "/v1/completions")],
)
def test_health_metrics_and_preflights_need_no_key_and_have_no_tenant(
    client: TestClient, method: str, path: str
) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.text) == (200, NO_TENANT)


def test_the_open_paths_are_below_the_applications_prefix() -> None:
    client = TestClient(APPLICATION, root_path="/llm")
    assert client.get("/llm/health").status_code == 200
    assert client.get("/llm/v1/health").status_code == 401


def test_a_websocket_without_a_known_key_is_closed(client: TestClient) -> None:
    with (
        pytest.raises(WebSocketDisconnect) as closed,
        client.websocket_connect("/v1/realtime", headers=bearer("sk-no")),
    ):
        pass
    assert closed.value.code == 1008


def test_a_call_does_not_keep_the_previous_tenant() -> None:
    async def ask(headers: Iterable[tuple[bytes, bytes]], path: str) -> bytes:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            raise AssertionError("nobody reads the body")

        scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers)}
        await APPLICATION(scope, receive, send)
        return bytes(sent[-1]["body"])

    async def run() -> list[bytes]:
        first = await ask([(b"authorization", b"Bearer sk-beta")], "/v1/models")
        return [first, await ask([], "/health")]

    assert asyncio.run(run()) == [b"team-b", NO_TENANT.encode()]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"not set$"),
        ("", r"empty$"),
        ("secret\n", r"visible ASCII characters$"),
        ("sec ret", r"visible ASCII characters$"),
        ("secr\u00e9t", r"visible ASCII characters$"),
        ("sk-alpha", r"a key that no other one holds$"),
    ],
)
def test_an_invalid_key_variable_is_reported_without_its_value(
    value: str | None, message: str
) -> None:
    environment = {"A_KEY": "sk-alpha"} | ({} if value is None else {"B_KEY": value})
    with pytest.raises(ConfigError, match=rf"^http\.api_keys\.1\.env: 'B_KEY' .*{message}") as info:
        read_keys(CONFIGURED[:2], environment)
    assert not value or value not in str(info.value)
