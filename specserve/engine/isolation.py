"""Keeps apart by tenant what vLLM shares between requests and a client can name.

That is: the ids of requests, the media that its caches hold, and stored responses. The routes by
which one call reaches what is nobody's own are closed. :mod:`specserve.engine.tenants` does the
rest: the prefix cache and our own sources.
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
        *("/pooling", "/classify", "/v1/embeddings", "/v2/embed"),
        *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    )
)
"""vLLM's routes that tell and change nothing of other requests, given what this module does.

The others load adapters, abort by id, put the engine to sleep, take data from other engines' caches
or call methods of the workers: all for every tenant.
"""

_RESPONSE_STORES = ("response_store", "msg_store", "event_store", "background_tasks")
_MEDIA = ("image", "video", "audio")
"""The modalities whose cache keys vLLM makes of their own options; the others' of all options."""
_TENANT_FACTOR = "specserve_tenant"

V = TypeVar("V")


class TenantLLM(ServedLLM):
    """vLLM's engine client, with request ids of their own for each tenant.

    A client may choose its request's id, by a header or in the body, and vLLM aborts by that id:
    all requests that have it.
    """

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, **options: Any
    ) -> RequestOutputCollector:
        """As vLLM's; the id is the current tenant's."""
        return await super().add_request(own_id(request_id), prompt, params, **options)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """As vLLM's; of ids that clients know, those of the current tenant's requests alone."""
        if not internal:
            ids = [request_id] if isinstance(request_id, str) else request_id
            request_id = [own_id(each) for each in ids]
        await super().abort(request_id, internal)


def own_id(request_id: str) -> str:
    """The id under which the engine knows the current tenant's request."""
    tenant = blake2b(CURRENT_TENANT.get().encode(), digest_size=8).hexdigest()
    return f"{tenant}-{request_id}"


def part_media(renderer: Any) -> None:
    """Has every cache of vLLM's that holds media find for a tenant only what that tenant sent.

    All of them, in the front end, the engine core and the workers, go by one key, which is made of
    the media or of the ``uuid`` that the client gives it, and of the options that it was read with.
    The tenant becomes one of these options; none is used for anything else at that point.

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
    factor = {_TENANT_FACTOR: scope_of(CURRENT_TENANT.get())}
    parted = {name: {**given.get(name, {}), **factor} for name in (*given, *_MEDIA)}
    return process(*args, media_io_kwargs=parted, **kwargs)


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
    """Has stored responses be found, continued, cancelled and replaced by their tenant alone.

    Args:
        handler: vLLM's ``OpenAIServingResponses``; None: the model does not generate.
    """
    if handler is not None:
        for name in _RESPONSE_STORES:
            setattr(handler, name, TenantDict())


def close_routes(app: FastAPI) -> None:
    """Takes every route out of vLLM's application that is not one of :data:`TENANT_ROUTES`.

    Those of SageMaker's sessions are calls of one route, and a session is no tenant's own.
    """
    is_open = TENANT_ROUTES - ({"/invocations"} if _has_sessions() else set())
    closed = [each for each in app.routes if getattr(each, "path", "") not in is_open]
    for route in closed:
        app.routes.remove(route)
    paths = ", ".join(sorted({getattr(each, "path", repr(each)) for each in closed}))
    logger.info("Routes closed where API keys are configured: %s", paths)


def _has_sessions() -> bool:
    # Here, because the import sets the level of the root logger; vLLM does so with these routes.
    from model_hosting_container_standards.sagemaker.config import (  # type: ignore[import-untyped]
        SageMakerConfig,
    )

    return bool(SageMakerConfig().enable_stateful_sessions)
