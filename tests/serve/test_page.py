from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from math import dist
from typing import Any

import msgspec
import prometheus_client
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from specserve.core.config import parse
from specserve.core.metrics import SpeculationSnapshot
from specserve.core.recent import RecentRequest, RecentStep, Tokens
from specserve.core.source_config import source_sections
from specserve.engine.tenants import CURRENT_TENANT
from specserve.serve import page
from specserve.serve.page import ReplicaView, SpeculationPage, with_texts
from specserve.serve.shared import FRESH_S
from specserve.serve.tenants import TenantMiddleware, read_keys

ENVIRONMENT = {"KEY_A": "sk-a", "KEY_B": "sk-b"}
LONG_S, SHORT_S = 30.0, 0.05
"""Time limits for answers that come and for answers that do not."""


def decode(tokens: Sequence[int]) -> str:
    """A token is a byte of UTF-8."""
    return bytes(tokens).decode(errors="replace")


class Engine:
    """The part of an engine that the page uses. Each tenant has a request with its name as text."""

    def __init__(self) -> None:
        self.hangs = False
        self.num_asked = 0

    async def speculation(self) -> SpeculationSnapshot | None:
        self.num_asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        return None

    async def recent_requests(self, tenant: str) -> tuple[RecentRequest[Tokens], ...]:
        self.num_asked += 1
        name = tuple(f"of {tenant}".encode())
        return (RecentRequest("0", (RecentStep("", 0, 0, len(name), (), name, ()),)),)

    def decoder(self) -> Callable[[Sequence[int]], str]:
        return decode


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    monkeypatch.setattr(page, "ANSWER_TIMEOUT_S", LONG_S)
    monkeypatch.setattr(page, "PEERS_TIMEOUT_S", LONG_S)
    counter = prometheus_client.Counter("vllm:generation_tokens", "", ["engine"], registry=registry)
    counter.labels("0").inc(5)
    counter.labels("1").inc(2)


def client(
    engine: Any,
    ask_all: Callable[[SpeculationPage, str], Awaitable[Sequence[ReplicaView | BaseException]]],
    **http: Any,
) -> TestClient:
    """The page of an application with two replicas and its API keys."""
    placement, speculation = {"num_replicas": 2}, [{"kind": "trie", "max_bytes": 16 << 20}]
    sections = {"placement": placement, "speculation": speculation, "http": http}
    config = parse({"model": {"path": "m"}, **sections})
    made = SpeculationPage(config, engine, "one", lambda tenant: ask_all(made, tenant))
    app = FastAPI()
    app.include_router(made.router())
    keys = read_keys(config.http.api_keys, ENVIRONMENT)
    return TestClient(TenantMiddleware(app, keys) if keys else app)


async def both(this: SpeculationPage, tenant: str) -> list[ReplicaView | BaseException]:
    view = await this.view(tenant)
    return [view, msgspec.structs.replace(view, replica="another")]


async def this_alone(this: SpeculationPage, tenant: str) -> list[ReplicaView | BaseException]:
    return [RuntimeError("its engine has died"), await this.view(tenant)]


async def none_in_time(this: SpeculationPage, tenant: str) -> list[ReplicaView | BaseException]:
    await asyncio.Event().wait()
    return []


def test_the_data_have_all_replicas(engine: Engine) -> None:
    data = client(engine, both).get("/speculation/data").json()
    assert [each["replica"] for each in data["replicas"]] == ["another", "one"]
    assert [each["generated_tokens"] for each in data["replicas"]] == [7, 7]
    assert data["num_replicas"] == 2
    assert data["trie_max_bytes"] == 16 << 20
    assert 200_000 < data["trie_max_tokens"] < 300_000


@pytest.mark.parametrize(("ask_all", "limit_s"), [(this_alone, LONG_S), (none_in_time, SHORT_S)])
def test_a_replica_that_fails_is_left_out_of_the_data(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ask_all: Any, limit_s: float
) -> None:
    monkeypatch.setattr(page, "PEERS_TIMEOUT_S", limit_s)
    data = client(engine, ask_all).get("/speculation/data").json()
    assert [each["replica"] for each in data["replicas"]] == ["one"]
    assert data["num_replicas"] == 2


def test_an_engine_that_does_not_answer_gives_503(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.hangs = True
    monkeypatch.setattr(page, "ANSWER_TIMEOUT_S", SHORT_S)
    http = client(engine, none_in_time)
    monkeypatch.setattr(page, "PEERS_TIMEOUT_S", SHORT_S)  # the page's limit for both stays long
    assert http.get("/speculation/data").status_code == 503


def shown_texts(answer: Any) -> set[str]:
    replicas = answer.json()["replicas"]
    requests = [request for each in replicas for request in each["requests"]]
    return {step["own"] for request in requests for step in request["steps"]}


def test_texts_are_shown_only_if_configured(engine: Engine) -> None:
    assert shown_texts(client(engine, both).get("/speculation/data")) == {""}
    shows = client(engine, both, show_text=True)
    assert shown_texts(shows.get("/speculation/data")) == {"of "}


def test_a_disabled_page_gives_404(engine: Engine) -> None:
    http = client(engine, both, speculation_page=False)
    assert http.get("/speculation").status_code == 404
    assert http.get("/speculation/data").status_code == 404


def test_the_page_needs_no_key_and_its_data_are_by_tenant(engine: Engine) -> None:
    keys = [{"env": name, "tenant": name[-1].lower()} for name in ENVIRONMENT]
    with client(engine, both, show_text=True, api_keys=keys) as http:
        assert http.get("/speculation").status_code == 200
        assert http.get("/speculation/data").status_code == 401
        for tenant in ("a", "b"):
            bearer = {"Authorization": f"Bearer sk-{tenant}"}
            assert shown_texts(http.get("/speculation/data", headers=bearer)) == {f"of {tenant}"}
    assert CURRENT_TENANT.get() == "-"


def test_a_tenants_calls_within_a_second_share_one_answer(
    engine: Engine,
) -> None:
    num_broadcasts = 0

    async def count(this: SpeculationPage, tenant: str) -> list[ReplicaView | BaseException]:
        nonlocal num_broadcasts
        num_broadcasts += 1
        return [await this.view(tenant) for _ in range(3)]

    keys = [{"env": name, "tenant": name[-1].lower()} for name in ENVIRONMENT]
    with client(engine, count, show_text=True, api_keys=keys) as http:
        began = time.monotonic()
        for _ in range(10):
            for tenant in ("a", "b"):
                bearer = {"Authorization": f"Bearer sk-{tenant}"}
                answer = http.get("/speculation/data", headers=bearer)
                assert shown_texts(answer) == {f"of {tenant}"}
        most = 1 + int((time.monotonic() - began) / FRESH_S)
    assert 2 <= num_broadcasts <= 2 * most
    assert 3 <= engine.num_asked <= 3 * most  # the counts, and each tenant's requests


def test_the_page_names_no_host_and_may_load_nothing(engine: Engine) -> None:
    answer = client(engine, both).get("/speculation")
    assert answer.headers["content-type"].startswith("text/html")
    assert set(re.findall(r"https?://[^\"' ]+", answer.text)) == {"http://www.w3.org/2000/svg"}
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_each_step_has_the_text_that_it_added() -> None:
    word = tuple("中文".encode())
    steps = [
        RecentStep("", 0, 0, 1, (), tuple(b"x"), ()),
        RecentStep("ngram", 4, 4, 5, word[:4], word[4:5], ()),  # ends within a character
        RecentStep("trie_local", 2, 0, 1, (), word[5:], tuple(b"\x87!")),
    ]
    assert list(with_texts(steps, decode)) == [
        RecentStep("", 0, 0, 1, "", "x", ""),
        RecentStep("ngram", 4, 4, 5, "中", "", ""),
        RecentStep("trie_local", 2, 0, 1, "", "文", "文!"),
    ]


def test_the_texts_of_all_steps_add_up_to_the_text() -> None:
    text = "Grüße aus der 東京タワー, 🗼🗼 und so weiter. " * 3
    tokens = tuple(text.encode())
    steps = [
        RecentStep("mtp", 3, 2, 3, tokens[start : start + 2], tokens[start + 2 : start + 3], ())
        for start in range(0, len(tokens), 3)
    ]
    views = with_texts(steps, decode)
    assert "".join(view.accepted + view.own for view in views) == text


def test_the_page_has_the_labels_and_colours_of_all_sources() -> None:
    text = page.html()
    for kind, section in source_sections().items():
        assert f'"{kind}": [' in text
        for label in section.LABELS:
            assert f'"{label.name}"' in text
            assert f"[data-source={label.name}] {{ --c: {label.light} }}" in text
            assert f"[data-source={label.name}] {{ --c: {label.dark} }}" in text
    assert "[data-source=trie] { --c: #0a7a58 }" in text


def lab(colour: str) -> tuple[float, float, float]:
    """A colour ``#rrggbb`` in CIELAB (CIE 15:2004, D65), where distances match perception."""
    shares = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    fx, fy, fz = (
        t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x, y, z)
    )
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_sources_colour_differs_from_the_others_and_from_the_pages_own(scheme: str) -> None:
    labels = [label for section in source_sections().values() for label in section.LABELS]
    colours = {label.name: getattr(label, scheme) for label in labels}
    for name in ("own", "muted", "bad"):
        first, second = re.findall(f"--{name}: (#[0-9a-f]{{6}});", page.html())
        colours[name] = first if scheme == "light" else second
    for label in labels:
        others = (name for name in colours if name != label.name)
        distances = {name: dist(lab(colours[label.name]), lab(colours[name])) for name in others}
        assert min(distances.values()) > 24, (label.name, distances)
