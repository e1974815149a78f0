"""The draft memory over HTTP: ``/v1/speculation/memory`` teaches, tells and clears a tenant's own.

What it costs is bounded: bytes of a body, lines, tokens of a line, one call of each kind at a time
of each tenant, and bytes a second. Texts are tokenized in a thread of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import ceil
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from specserve.core.config import AppConfig
from specserve.core.errors import ConfigError, SnapshotError, StoreError
from specserve.engine.cluster_memory import shared_trie
from specserve.engine.tenant_memory import TenantMemory
from specserve.engine.tenants import CURRENT_TENANT
from specserve.serve.middleware import openai_error
from specserve.serve.paths import path_of

MAX_BODY_BYTES = 4 << 20
MAX_LINES = 4096
"""Each is a record or more in every replica, whatever its length."""

BYTES_PER_S = 128 << 10
"""Of bodies, for each tenant and replica. Tokenizing them takes some 5 % of a CPU."""
BURST_S = 2.0
"""What may come at once: so many seconds' bytes, and one body more."""
CALL_BYTES = 16 << 10
"""What a call counts for beside its body."""
LINE_BYTES = 256
"""What a line counts for beside its bytes: every replica learns it as a text of its own."""

_PATH = "/v1/speculation/memory"

T = TypeVar("T")
_Pay = Callable[[int], None]


def is_memory(scope: Scope) -> bool:
    """Whether a call is one of these routes, whose body is not for vLLM."""
    return path_of(scope) == _PATH


class Turns:
    """Who may call when: of each kind one call at a time, and no more bytes than allowed.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answering: set[tuple[str, str]] = set()
        self._paid_at: dict[tuple[str, str], float] = {}

    @contextmanager
    def take(self, kind: str, tenant: str) -> Iterator[_Pay]:
        """A call of a tenant; told of the bytes that it takes.

        Raises:
            HTTPException: 429, it comes too early.
        """
        key = kind, tenant
        wait_s = self._paid_at.get(key, 0.0) - self._clock() - BURST_S
        if wait_s > 0:
            detail = f"{BYTES_PER_S} bytes a second are taken: come back in {wait_s:.1f} s"
            raise HTTPException(429, detail, {"Retry-After": str(ceil(wait_s))})
        if key in self._answering:
            raise HTTPException(429, "another such call of the tenant is being answered")

        def pay(num_bytes: int) -> None:
            paid_at = max(self._paid_at.get(key, 0.0), self._clock())
            self._paid_at[key] = paid_at + num_bytes / BYTES_PER_S

        pay(CALL_BYTES)
        self._answering.add(key)
        try:
            yield pay
        finally:
            self._answering.remove(key)


class MemoryApi:
    """The routes of one replica.

    Args:
        config: the application's configuration.
        memory: makes what is filled; asked only where the routes are on.
        turns: see there.
    """

    def __init__(
        self, config: AppConfig, memory: Callable[[], TenantMemory], turns: Turns | None = None
    ) -> None:
        self._model = config.model.name
        self._has_keys = bool(config.http.api_keys)
        self._turns = turns or Turns()
        self._refusal = _why_off(config)
        if self._refusal is None:
            self._memory = memory()
            self._shares = self._has_keys and shared_trie(config).share_tenants
        # Apart, so that nobody waits with a small call for others' texts.
        self._reading = ThreadPoolExecutor(1, "memory-texts")
        self._asking = ThreadPoolExecutor(4, "memory-calls")

    def router(self) -> APIRouter:
        """The routes; where they are off they say so."""
        router = APIRouter()

        @router.post(_PATH, response_model=dict[str, Any])
        async def teach(request: Request) -> Response:
            """Teaches the tenant's draft memory texts, JSON Lines in the body."""
            return await self._answered(request, self._teach)

        @router.get(_PATH, response_model=dict[str, Any])
        async def tell(request: Request) -> Response:
            """What the draft memory holds of the tenant."""
            return await self._answered(request, self._tell)

        @router.delete(_PATH, response_model=dict[str, Any])
        async def forget(request: Request) -> Response:
            """Forgets all that the draft memory holds of the tenant, in the whole cluster."""
            return await self._answered(request, self._forget)

        return router

    async def _answered(
        self, request: Request, answer: Callable[[Request, str, _Pay], Awaitable[dict[str, Any]]]
    ) -> Response:
        if self._refusal is not None:
            raise HTTPException(*self._refusal)
        caller = CURRENT_TENANT.get() if self._has_keys else ""
        try:
            with self._turns.take(request.method, caller) as pay:
                _check_query(request)
                told = await answer(request, "" if self._shares else caller, pay)
        except ConfigError as error:
            return openai_error(str(error), 400, error.field)
        except (StoreError, SnapshotError) as error:
            raise HTTPException(503, f"the draft memory: {error}") from None
        except ClientDisconnect:
            return Response(status_code=499)
        return JSONResponse(
            {"object": "speculation.memory", "model": self._model} | told,
            headers={"Cache-Control": "no-store"},
        )

    async def _teach(self, request: Request, tenant: str, pay: _Pay) -> dict[str, Any]:
        body = bytearray()
        async for piece in request.stream():
            pay(len(piece))
            body += piece
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"a body has at most {MAX_BODY_BYTES} bytes")
        num_lines = body.rstrip(b"\n").count(b"\n") + 1
        pay(LINE_BYTES * num_lines)
        if num_lines > MAX_LINES:
            raise HTTPException(413, f"a body has at most {MAX_LINES} lines")
        adapter = request.query_params.get("adapter", "")
        texts = await _in(self._reading, lambda: self._memory.read(bytes(body)))
        await _in(self._asking, lambda: self._memory.teach(tenant, adapter, texts))
        return {"lines": len(texts), "tokens": sum(len(tokens) for tokens, _ in texts)}

    async def _tell(self, request: Request, tenant: str, pay: _Pay) -> dict[str, Any]:
        held = await _in(self._asking, lambda: self._memory.held(tenant))
        return {"tokens": sum(each["tokens"] for each in held), "namespaces": held}

    async def _forget(self, request: Request, tenant: str, pay: _Pay) -> dict[str, Any]:
        if self._shares:
            why = "all tenants share one memory (share_tenants), and nothing in it is one's own"
            raise HTTPException(403, f"{why}; `specserve trie purge` clears it")
        return {"forgotten_tokens": await _in(self._asking, lambda: self._memory.purge(tenant))}


def _why_off(config: AppConfig) -> tuple[int, str] | None:
    """The status and the reason that calls get where the routes are off; None: they are on."""
    choice = config.http.memory_api
    if choice == "never" or (choice == "with_api_keys" and not config.http.api_keys):
        switch = "`always` switches this on, and `with_api_keys` where there are `http.api_keys`"
        return 403, f"`http.memory_api` is `{choice}`: {switch}"
    try:
        shared_trie(config)
    except ConfigError as error:
        return 404, f"no draft memory is shared here: {error}"
    return None


def _check_query(request: Request) -> None:
    for key in request.query_params:
        if request.method != "POST" or key != "adapter":
            allowed = "adapter" if request.method == "POST" else "none"
            raise ConfigError("query parameter", key, f"{allowed}; the API key tells the tenant")


async def _in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work)
