"""The page ``/speculation``: drafted and accepted tokens of all replicas, live.

The page itself holds no data. While it is visible it asks ``/speculation/data`` once a second. The
replica that gets this call asks all replicas. Each engine is asked at most once a second for each
tenant, for all viewers together. Rates are computed from the difference of two answers.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec
import prometheus_client
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from specserve.core.config import AppConfig
from specserve.core.metrics import SpeculationSnapshot
from specserve.core.recent import RecentRequest, RecentStep, Tokens
from specserve.core.source_config import TrieConfig, source_sections
from specserve.engine.tenants import CURRENT_TENANT
from specserve.serve.shared import CACHEABLE, Shared
from specserve.trie.layout import PAGE, pages_in

if TYPE_CHECKING:
    from specserve.engine.llm import Engine

ANSWER_TIMEOUT_S = 2.0
"""Time limit for an answer of rank 0, in seconds."""
PEERS_TIMEOUT_S = 3.0
"""Time limit for the answers of all replicas, which are asked at the same time, in seconds."""

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_CONTEXT_TOKENS = 8
_TEXTS_CACHED = 16_384


class ReplicaView(msgspec.Struct, frozen=True):
    """One replica's counts since it started, and the last requests of the calling tenant.

    ``clock_s`` is a monotonic time in seconds, for differences.
    """

    replica: str
    clock_s: float
    generated_tokens: float
    num_running: float
    num_waiting: float
    speculation: SpeculationSnapshot
    requests: tuple[RecentRequest[str], ...]


class SpeculationPage:
    """The routes of the page, and one replica's part of its data.

    ``replica`` is the replica's id. ``ask_all`` calls :meth:`view` on every replica; it returns
    each replica's view or exception.
    """

    def __init__(
        self,
        config: AppConfig,
        engine: Engine,
        replica: str,
        ask_all: Callable[[str], Awaitable[Sequence[ReplicaView | BaseException]]],
    ) -> None:
        self._config = config
        self._engine = engine
        self._replica = replica
        self._ask_all = ask_all
        self._snapshots: Shared[None, SpeculationSnapshot | None] = Shared(
            lambda _: engine.speculation(), ANSWER_TIMEOUT_S
        )
        self._views = Shared(self._collect_view, ANSWER_TIMEOUT_S)
        self._answers = Shared(self._answer, PEERS_TIMEOUT_S + ANSWER_TIMEOUT_S + 1)
        # Successive answers repeat most texts, so decoded texts are cached.
        self._decode = lru_cache(_TEXTS_CACHED)(engine.decoder()) if config.http.show_text else None

    async def view(self, tenant: str) -> ReplicaView:
        """Returns this replica's data for ``tenant``. Raises TimeoutError if rank 0 is silent.

        Asks the engine at most once a second, because each question delays all shards' next step.
        """
        return await self._views.get(tenant)

    async def _collect_view(self, tenant: str) -> ReplicaView:
        snapshot = await self._snapshots.get(None)
        requests = await self._engine.recent_requests(tenant)
        return ReplicaView(
            self._replica,
            time.monotonic(),
            _vllm("vllm:generation_tokens_total"),
            _vllm("vllm:num_requests_running"),
            _vllm("vllm:num_requests_waiting"),
            snapshot or SpeculationSnapshot(),
            await asyncio.to_thread(self._with_texts, requests),
        )

    def router(self) -> APIRouter:
        """Returns the routes of the page and its data; none if ``http.speculation_page`` is off."""
        router = APIRouter()
        if not self._config.http.speculation_page:
            return router
        page = html()
        headers = {**_HEADERS, "Content-Security-Policy": _content_security_policy(page)}

        @router.get("/speculation", include_in_schema=False)
        async def speculation() -> Response:
            return Response(page, media_type="text/html", headers=headers)

        @router.get("/speculation/data", include_in_schema=False)
        async def data() -> Response:
            tenant = CURRENT_TENANT.get() if self._config.http.api_keys else ""
            answer = await self._answers.get(tenant)
            # A proxy must not give one tenant's answer to another.
            headers = _HEADERS if self._config.http.api_keys else {**_HEADERS, **CACHEABLE}
            return Response(answer, headers=headers, media_type="application/json")

        return router

    async def _answer(self, tenant: str) -> bytes:
        try:
            async with asyncio.timeout(PEERS_TIMEOUT_S):
                answers = await self._ask_all(tenant)
            views = [each for each in answers if isinstance(each, ReplicaView)]
        except TimeoutError:  # one replica hangs, until Serve's health check replaces it
            views = []
        if not views:
            try:
                views = [await self.view(tenant)]
            except TimeoutError:
                detail = f"the engine did not answer within {ANSWER_TIMEOUT_S:g} s"
                raise HTTPException(503, detail) from None
        config = self._config
        trie_bytes = sum(
            source.max_bytes for source in config.speculation if isinstance(source, TrieConfig)
        )
        data = {
            "model": config.model.name,
            "kinds": [source.kind for source in config.speculation],
            "drafts_in_engine": config.drafts_in_engine,
            # Size of each replica's draft memory; 0: there is none.
            "trie_max_bytes": trie_bytes,
            "trie_max_tokens": pages_in(trie_bytes) * PAGE if trie_bytes else 0,
            "show_text": config.http.show_text,
            "num_replicas": config.placement.num_replicas,
            "replicas": sorted(views, key=lambda view: view.replica),
        }
        return msgspec.json.encode(data)

    def _with_texts(
        self, requests: Sequence[RecentRequest[Tokens]]
    ) -> tuple[RecentRequest[str], ...]:
        return tuple(
            RecentRequest(each.request, tuple(with_texts(each.steps, self._decode)))
            for each in requests
        )


def html() -> str:
    """Returns the page, with the colours and the labels of all kinds of source."""
    sections = source_sections()
    named = {kind: each.LABELS[0] for kind, each in sections.items()}
    named |= {label.name: label for each in sections.values() for label in each.LABELS}
    light = (f"[data-source={name}] {{ --c: {label.light} }}" for name, label in named.items())
    dark = (f"[data-source={name}] {{ --c: {label.dark} }}" for name, label in named.items())
    colours = [*light, "@media (prefers-color-scheme: dark) {", *dark, "}"]
    labels = {kind: [label.name for label in each.LABELS] for kind, each in sections.items()}
    return (
        files("specserve.serve")
        .joinpath("speculation.html")
        .read_text()
        .replace("/* the sources' colours */", "\n".join(colours))
        .replace("const LABELS = {}", f"const LABELS = {json.dumps(labels)}")
    )


def _content_security_policy(page: str) -> str:
    """Returns a policy that allows only the page's own style and script, and no other host.

    The page shows text of models and clients, which may contain scripts.
    """

    def own(tag: str) -> str:
        (text,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {own('script')}; "
        f"style-src {own('style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def with_texts(
    steps: Sequence[RecentStep[Tokens]], decode: Callable[[Tokens], str] | None
) -> Iterator[RecentStep[str]]:
    """Yields the steps of one request with the text that each added.

    Args:
        steps: in the order of decoding.
        decode: turns tokens into text; None: texts are not shown.
    """
    context: Tokens = ()
    for step in steps:
        texts = ("", "", "")
        if decode is not None:
            after = context + step.accepted
            texts = (
                _added(decode, context, step.accepted),
                _added(decode, after, step.own),
                _added(decode, after, step.refused),
            )
            context = (after + step.own)[-_CONTEXT_TOKENS:]
        yield RecentStep(step.source, step.num_drafted, step.num_accepted, step.num_new, *texts)


def _added(decode: Callable[[Tokens], str], context: Tokens, tokens: Tokens) -> str:
    """Returns the text that ``tokens`` add after ``context``.

    A character of several tokens belongs to the token that completes it.
    """
    before = decode(context).rstrip("\ufffd")
    return decode(context + tokens).rstrip("\ufffd")[len(before) :]


def _vllm(series: str) -> float:
    """Returns the sum of one of vLLM's metric series in this process; 0 before it exists."""
    families = prometheus_client.REGISTRY.restricted_registry([series]).collect()
    return sum(sample.value for family in families for sample in family.samples)
