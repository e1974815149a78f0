"""Separates tenants where vLLM lets a client name something that all requests share.

These are request ids, cached media and stored responses. Routes that act on all tenants' requests
are closed. :mod:`specserve.engine.tenants` separates the prefix cache and the draft sources.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from fastapi import FastAPI
from vllm.v1.engine.output_processor import RequestOutputCollector

from specserve.engine.client import ServedLLM
from specserve.engine.tenants import CURRENT_TENANT, scope_of

logger = logging.getLogger(__name__)

TENANT_ROUTES = frozenset(
    (
        *("/health", "/ping", "/load", "/version", "/metrics", "/v1/models"),
        *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/static"),
        *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"),
        *("/v1/messages", "/v1/messages/count_tokens", "/cohere/v2/chat"),
        *("/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
        *("/generative_scoring", "/v1/systemone", "/invocations"),
        *("/tokenize", "/detokenize", "/tokenizer_info"),
        *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"),
    )
)
"""vLLM's routes that cannot read or change other tenants' requests once this module is applied.

The other routes load adapters, abort by id, put the engine to sleep, read other engines' caches or
call worker methods, and affect all tenants.
"""

_RESPONSE_STORES = ("response_store", "msg_store", "event_store", "background_tasks")
_MEDIA = ("image", "video", "audio")
"""Modalities whose cache keys include only their own options; other keys include all options."""
_TENANT_OPTION = "specserve_tenant"

V = TypeVar("V")


class TenantLLM(ServedLLM):
    """vLLM's engine client, with the tenant as a part of each request id.

    A client may choose its request id in a header or in the body. vLLM aborts all requests with the
    same id.
    """

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, **options: Any
    ) -> RequestOutputCollector:
        """vLLM's method, with the id made by :func:`own_id`."""
        return await super().add_request(own_id(request_id), prompt, params, **options)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """vLLM's method. Ids that clients know abort only the current tenant's requests."""
        if not internal:
            ids = [request_id] if isinstance(request_id, str) else request_id
            request_id = [own_id(each) for each in ids]
        await super().abort(request_id, internal)


def own_id(request_id: str) -> str:
    """The engine's id for a request of the current tenant."""
    tenant = blake2b(CURRENT_TENANT.get().encode(), digest_size=8).hexdigest()
    return f"{tenant}-{request_id}"


def part_media(renderer: Any) -> None:
    """Separates tenants in all of vLLM's media caches.

    The caches in the front end, the engine core and the workers share one key. vLLM makes it from
    the media or the client's ``uuid``, and from the options for reading the media. The tenant
    becomes one of these options; at that point vLLM uses them for nothing else.

    Args:
        renderer: the ``renderer`` of a vLLM ``AsyncLLM``.
    """
    for name in ("_process_multimodal", "_process_multimodal_async"):
        setattr(renderer, name, partial(_process_as_tenant, getattr(renderer, name)))


def _process_as_tenant(
    process: Callable[..., V],
    *args: Any,
    media_io_kwargs: Mapping[str, Mapping[str, object]] | None = None,
    **kwargs: Any,
) -> V:
    given = media_io_kwargs or {}
    tenant = {_TENANT_OPTION: scope_of(CURRENT_TENANT.get())}
    options = {name: {**given.get(name, {}), **tenant} for name in (*given, *_MEDIA)}
    return process(*args, media_io_kwargs=options, **kwargs)


class TenantDict(MutableMapping[str, V]):
    """A dictionary in which each tenant has its own entries and sees no others."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], V] = {}

    def __getitem__(self, key: str) -> V:
        return self._entries[CURRENT_TENANT.get(), key]

    def __setitem__(self, key: str, value: V) -> None:
        self._entries[CURRENT_TENANT.get(), key] = value

    def __delitem__(self, key: str) -> None:
        del self._entries[CURRENT_TENANT.get(), key]

    def __iter__(self) -> Iterator[str]:
        return (key for tenant, key in self._entries if tenant == CURRENT_TENANT.get())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def part_responses(handler: Any) -> None:
    """Lets only its own tenant find, continue, cancel or replace a stored response.

    Args:
        handler: vLLM's ``OpenAIServingResponses``.
    """
    for name in _RESPONSE_STORES:
        setattr(handler, name, TenantDict())


def close_routes(app: FastAPI) -> None:
    """Removes from vLLM's application every route that is not in :data:`TENANT_ROUTES`.

    SageMaker's sessions belong to no tenant. If they are on, ``/invocations`` is removed too.
    """
    is_open = TENANT_ROUTES - ({"/invocations"} if _has_sessions() else set())
    closed = [each for each in app.routes if getattr(each, "path", "") not in is_open]
    for route in closed:
        app.routes.remove(route)
    paths = ", ".join(sorted({getattr(each, "path", repr(each)) for each in closed}))
    logger.info("Routes closed where API keys are configured: %s", paths)


def _has_sessions() -> bool:
    # Imported here, because it sets the root logger's level; vLLM imports it with these routes.
    from model_hosting_container_standards.sagemaker.config import (  # type: ignore[import-untyped]
        SageMakerConfig,
    )

    return bool(SageMakerConfig().enable_stateful_sessions)
