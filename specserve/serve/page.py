"""The page ``/speculation``: live, what is drafted and accepted, of all replicas together.

The page itself holds no data. It asks ``/speculation/data`` once a second while someone looks, and
the replica that happens to be asked asks the others. However many look, each replica's engine is
asked once a second for all of a tenant. Rates come from the difference of two answers.
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
from specserve.core.recent import RecentRequest, RecentStep, StepCounts
from specserve.core.source_config import TrieConfig, source_sections
from specserve.engine.tenants import CURRENT_TENANT
from specserve.serve.shared import CACHEABLE, Shared
from specserve.trie.layout import PAGE, pages_in

if TYPE_CHECKING:
    from specserve.engine.llm import Engine

ANSWER_TIMEOUT_S = 2.0
"""How long rank 0 may take."""
PEERS_TIMEOUT_S = 3.0
"""How long the replicas may take, all at once."""

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_CONTEXT_TOKENS = 8
_TEXTS_CACHED = 16_384


class StepView(StepCounts, frozen=True):
    """One step of a request: what was drafted, and what the text became.

    Attributes:
        accepted: text of the accepted tokens; as the other texts empty where none are shown.
        own: text of the tokens that were the target's own.
        refused: text of the draft tokens that were not accepted.
    """

    accepted: str = ""
    own: str = ""
    refused: str = ""


class RequestView(msgspec.Struct, frozen=True):
    """One request's last steps."""

    request: str
    steps: tuple[StepView, ...]


class ReplicaView(msgspec.Struct, frozen=True):
    """What one replica shows of itself: counts since it started, and the caller's last requests.

    Of ``clock_s``, in seconds, only differences mean something.
    """

    replica: str
    clock_s: float
    generated_tokens: float
    num_running: float
    num_waiting: float
    speculation: SpeculationSnapshot
    requests: tuple[RequestView, ...]


class SpeculationPage:
    """One replica's part of the page, and the routes that serve all of it.

    ``replica`` is its id. ``ask_all`` asks every replica for its :meth:`view`; what one raises
    stands for its answer.
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
        self._views = Shared(self._look, ANSWER_TIMEOUT_S)
        self._answers = Shared(self._answer, PEERS_TIMEOUT_S + ANSWER_TIMEOUT_S + 1)
        # Of what is asked for once a second nearly all was asked for a second ago.
        self._decode = lru_cache(_TEXTS_CACHED)(engine.decoder()) if config.http.show_text else None

    async def view(self, tenant: str) -> ReplicaView:
        """What this replica shows to ``tenant``. Raises TimeoutError if rank 0 is silent.

        The engine is asked once a second at most, since that keeps all shards from their next step.
        """
        return await self._views.get(tenant)

    async def _look(self, tenant: str) -> ReplicaView:
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
        """The page and its data; no routes where the configuration switches it off."""
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
            # A tenant's answer is for nobody else.
            headers = _HEADERS if self._config.http.api_keys else {**_HEADERS, **CACHEABLE}
            return Response(answer, headers=headers, media_type="application/json")

        return router

    async def _answer(self, tenant: str) -> bytes:
        try:
            async with asyncio.timeout(PEERS_TIMEOUT_S):
                answers = await self._ask_all(tenant)
            views = [each for each in answers if isinstance(each, ReplicaView)]
        except TimeoutError:  # one that hangs keeps all waiting, till Serve's health check ends it
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
            # Of each replica's draft memory; 0: there is none.
            "trie_max_bytes": trie_bytes,
            "trie_max_tokens": pages_in(trie_bytes) * PAGE if trie_bytes else 0,
            "show_text": config.http.show_text,
            "num_replicas": config.placement.num_replicas,
            "replicas": sorted(views, key=lambda view: view.replica),
        }
        return msgspec.json.encode(data)

    def _with_texts(self, requests: Sequence[RecentRequest]) -> tuple[RequestView, ...]:
        return tuple(
            RequestView(each.request, tuple(step_views(each.steps, self._decode)))
            for each in requests
        )


def html() -> str:
    """The page, with the colours and the labels of all kinds of source."""
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
    """Nothing but the page's own style and script, and nothing from another host.

    The page shows what models wrote and clients sent.
    """

    def own(tag: str) -> str:
        (text,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {own('script')}; "
        f"style-src {own('style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def step_views(
    steps: Sequence[RecentStep], decode: Callable[[tuple[int, ...]], str] | None
) -> Iterator[StepView]:
    """The steps of one request, in their order, with the text that each added.

    Args:
        steps: one after the other.
        decode: turns tokens into text; None: texts are not shown.
    """
    context: tuple[int, ...] = ()
    for step in steps:
        numbers = (step.source, step.num_drafted, step.num_accepted, step.num_new)
        if decode is None:
            yield StepView(*numbers)
            continue
        accepted, own = step.new[: step.num_accepted], step.new[step.num_accepted :]
        after = context + accepted
        yield StepView(
            *numbers,
            _added(decode, context, accepted),
            _added(decode, after, own),
            _added(decode, after, step.refused),
        )
        context = (after + own)[-_CONTEXT_TOKENS:]


def _added(
    decode: Callable[[tuple[int, ...]], str], context: tuple[int, ...], tokens: tuple[int, ...]
) -> str:
    """The text that ``tokens`` add: it depends on what stands before.

    Tokens may end within a character, which is told with the token that completes it.
    """
    before = decode(context).rstrip("\ufffd")
    return decode(context + tokens).rstrip("\ufffd")[len(before) :]


def _vllm(series: str) -> float:
    """The sum of one of vLLM's series in this process; 0 before it is there."""
    families = prometheus_client.REGISTRY.restricted_registry([series]).collect()
    return sum(sample.value for family in families for sample in family.samples)
