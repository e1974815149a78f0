"""``/v1/speculation/memory``: a tenant fills, inspects and clears its draft memory over HTTP.

Limits bound the cost: bytes and lines of a body, tokens of a line, and bytes a second. Each tenant
has one call of each HTTP method at a time. Texts are tokenized in a thread of their own.
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
from specserve.serve.bodies import without_pauses
from specserve.serve.middleware import openai_error
from specserve.serve.paths import path_of

MAX_BODY_BYTES = 4 << 20
MAX_LINES = 4096
"""Most lines of a body. Every replica keeps at least one record for each line."""

BYTES_PER_S = 128 << 10
"""Limit for each tenant, HTTP method and replica. Tokenizing this much takes about 5 % of a CPU."""
BURST_S = 2.0
"""Seconds of that rate that may be used in advance. The last call admitted may exceed it."""
CALL_BYTES = 16 << 10
"""Bytes that a call is charged in addition to its body."""
PURGE_BYTES = 128 << 10
"""Bytes that a DELETE is charged: every replica searches its memory for the tenant's texts."""
LINE_BYTES = 256
"""Bytes that a line is charged in addition to its text: every replica learns it separately."""

_PATH = "/v1/speculation/memory"

T = TypeVar("T")
_Charge = Callable[[int], None]


def is_memory(scope: Scope) -> bool:
    """Whether a call goes to ``/v1/speculation/memory``, whose body vLLM does not read."""
    return path_of(scope) == _PATH


class Turns:
    """Limits each tenant's calls: one of each kind at a time, and ``BYTES_PER_S``.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_progress: set[tuple[str, str]] = set()
        self._used_until: dict[tuple[str, str], float] = {}  # clock + charged bytes / BYTES_PER_S

    @contextmanager
    def take(self, kind: str, tenant: str) -> Iterator[_Charge]:
        """Admits one call, and yields a function that charges it a number of bytes.

        Raises:
            HTTPException: 429; the byte rate is used up, or another such call is in progress.
        """
        key = kind, tenant
        wait_s = self._used_until.get(key, 0.0) - self._clock() - BURST_S
        if wait_s > 0:
            detail = (
                f"at most {BYTES_PER_S} bytes a second, and each call counts {CALL_BYTES} more "
                f"than its body: try again in {wait_s:.1f} s"
            )
            raise HTTPException(429, detail, {"Retry-After": str(ceil(wait_s))})
        if key in self._in_progress:
            raise HTTPException(429, "another such call of the tenant is being answered")

        def charge(num_bytes: int) -> None:
            used_until = max(self._used_until.get(key, 0.0), self._clock())
            self._used_until[key] = used_until + num_bytes / BYTES_PER_S

        charge(CALL_BYTES)
        self._in_progress.add(key)
        try:
            yield charge
        finally:
            self._in_progress.remove(key)


class MemoryApi:
    """The routes of one replica.

    Args:
        config: the application's configuration.
        memory: returns the draft memory; called only if the routes are on.
        turns: limits the calls; None: a new one.
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
        # Several pools, so that a small call does not wait while another tenant's texts are
        # tokenized, or while a snapshot without them is written.
        self._reading = ThreadPoolExecutor(1, "memory-texts")
        self._asking = ThreadPoolExecutor(4, "memory-calls")
        self._forgetting = ThreadPoolExecutor(4, "memory-purges")

    def router(self) -> APIRouter:
        """Returns the routes. If the configuration switches them off, they answer why."""
        router = APIRouter()

        @router.post(_PATH, response_model=dict[str, Any])
        async def teach(request: Request) -> Response:
            """Adds the texts of the body (JSON Lines) to the tenant's draft memory."""
            return await self._answered(request, self._teach)

        @router.get(_PATH, response_model=dict[str, Any])
        async def tell(request: Request) -> Response:
            """Returns how many tokens the draft memory holds of the tenant, by namespace."""
            return await self._answered(request, self._tell)

        @router.delete(_PATH, response_model=dict[str, Any])
        async def forget(request: Request) -> Response:
            """Removes all texts of the tenant from the draft memory of the whole cluster."""
            return await self._answered(request, self._forget)

        return router

    async def _answered(
        self, request: Request, answer: Callable[[Request, str, _Charge], Awaitable[dict[str, Any]]]
    ) -> Response:
        if self._refusal is not None:
            raise HTTPException(*self._refusal)
        caller = CURRENT_TENANT.get() if self._has_keys else ""
        try:
            with self._turns.take(request.method, caller) as charge:
                _check_query(request)
                content = await answer(request, "" if self._shares else caller, charge)
        except ConfigError as error:
            return openai_error(str(error), 400, error.field)
        except (StoreError, SnapshotError) as error:
            raise HTTPException(503, f"the draft memory: {error}") from None
        except ClientDisconnect:
            return Response(status_code=499)
        return JSONResponse(
            {"object": "speculation.memory", "model": self._model} | content,
            headers={"Cache-Control": "no-store"},
        )

    async def _teach(self, request: Request, tenant: str, charge: _Charge) -> dict[str, Any]:
        body = bytearray()
        async for piece in Request(request.scope, without_pauses(request.receive)).stream():
            charge(len(piece))
            body += piece
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"a body has at most {MAX_BODY_BYTES} bytes")
        num_lines = body.rstrip(b"\n").count(b"\n") + 1
        charge(LINE_BYTES * num_lines)
        if num_lines > MAX_LINES:
            raise HTTPException(413, f"a body has at most {MAX_LINES} lines")
        adapter = request.query_params.get("adapter", "")
        texts = await _run_in(self._reading, lambda: self._memory.read(bytes(body)))
        await _run_in(self._asking, lambda: self._memory.teach(tenant, adapter, texts))
        return {"lines": len(texts), "tokens": sum(map(len, texts))}

    async def _tell(self, request: Request, tenant: str, charge: _Charge) -> dict[str, Any]:
        held = await _run_in(self._asking, lambda: self._memory.held(tenant))
        return {"tokens": sum(each["tokens"] for each in held), "namespaces": held}

    async def _forget(self, request: Request, tenant: str, charge: _Charge) -> dict[str, Any]:
        if self._shares:
            why = "all tenants share one memory (share_tenants), and nothing in it is one's own"
            raise HTTPException(403, f"{why}; `specserve trie purge` clears it")
        charge(PURGE_BYTES)
        num_tokens = await _run_in(self._forgetting, lambda: self._memory.purge(tenant))
        return {"forgotten_tokens": num_tokens}


def _why_off(config: AppConfig) -> tuple[int, str] | None:
    """The status and the reason that calls get if the routes are off; None: they are on."""
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


async def _run_in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Runs work in a thread. A cancelled call ends only after it, so that it keeps its turn."""
    job = pool.submit(work)
    try:
        return await asyncio.wrap_future(job)
    finally:
        if not job.done():
            await asyncio.wait([asyncio.wrap_future(job)])
