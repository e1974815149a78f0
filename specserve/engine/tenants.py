"""Writes the tenant and the speculation controls of an HTTP call into its engine requests.

The HTTP side sets both for the current call (:data:`CURRENT_TENANT`, :data:`CURRENT_CONTROLS`).
vLLM's handlers create the call's requests in the same context and send all of them through one
method of the engine's client. That method is wrapped here. A body therefore cannot choose the
tenant, and no handler can drop the controls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import blake2b
from secrets import token_hex
from types import MappingProxyType
from typing import Any

from specserve.sources.controls import NO_TENANT, REASONING_KEY, SALT_KEY, TENANT_KEY

CURRENT_TENANT: ContextVar[str] = ContextVar("specserve_tenant", default=NO_TENANT)
"""Tenant of the HTTP call being answered."""

CURRENT_CONTROLS: ContextVar[Mapping[str, object]] = ContextVar(
    "specserve_controls", default=MappingProxyType({})
)
"""Speculation controls of the HTTP call being answered, in the form of ``vllm_xargs``."""

IN_BEAM_SEARCH: ContextVar[bool] = ContextVar("specserve_beam_search", default=False)
"""Whether this context runs a beam search. It was admitted as a whole, and sends one request for
each beam and step."""

CURRENT_CALL: ContextVar[object] = ContextVar("specserve_call", default=None)
"""Key of the HTTP call being answered in :data:`RESERVED`."""

RESERVED: Counter[object] = Counter()
"""Places in the engine that a call was admitted to and that its requests have not taken yet. Every
call being answered has an entry."""

_BEAM_CONTROLS = {"speculation": "off", "learn": 0}
"""A beam's request generates one token, so drafts cannot help. Most beams are discarded, so their
texts are not learned."""


def stamp_requests(client: Any, *, with_tenants: bool) -> None:
    """Writes the call's controls, and the tenant, into every request of a vLLM ``engine_core``."""
    send = client.add_request_async

    async def stamp_and_send(request: Any) -> None:
        stamp_controls(request, CURRENT_CONTROLS.get())
        stamp_reasoning(request)
        if with_tenants:
            stamp(request, CURRENT_TENANT.get())
        await send(request)

    client.add_request_async = stamp_and_send


def stamp_controls(request: Any, controls: Mapping[str, object]) -> None:
    """Writes a call's speculation controls into a vLLM ``EngineCoreRequest``.

    Some of vLLM's handlers create sampling parameters without ``vllm_xargs``.
    """
    params = request.sampling_params
    if IN_BEAM_SEARCH.get():
        controls = _BEAM_CONTROLS
    if controls:
        params.extra_args = {**(params.extra_args or {}), **controls}


def stamp_reasoning(request: Any) -> None:
    """Copies how to tell reasoning from the answer, of a request with a grammar.

    vLLM gives it to the scheduler alone, but the source ``grammar`` follows the answer in rank 0.
    """
    params = request.sampling_params
    if params.structured_outputs is None:
        return
    given = request.reasoning_ended, request.reasoning_parser_kwargs
    if given != (None, None):
        params.extra_args = {**(params.extra_args or {}), REASONING_KEY: given}


def stamp(request: Any, tenant: str) -> None:
    """Writes ``tenant`` into a vLLM ``EngineCoreRequest``, over values that the client sent.

    Cache hits are faster, so a shared prefix cache would reveal other tenants' prompts. vLLM reuses
    blocks only between requests with equal ``cache_salt``, so each tenant gets its own. A client's
    salt still separates requests of its tenant, in the prefix cache and in drafters.
    """
    params = request.sampling_params
    fields = tenant_fields(tenant, request.cache_salt or "")
    params.extra_args = {**(params.extra_args or {}), **fields}
    salt = f"{scope_of(tenant)}\0{request.cache_salt or ''}"
    request.cache_salt = blake2b(salt.encode(), digest_size=16).hexdigest()


def tenant_fields(tenant: str, cache_salt: str = "") -> dict[str, object]:
    """The extra arguments that carry the tenant and the client's salt to the engine."""
    return {TENANT_KEY: tenant, SALT_KEY: cache_salt}


def scope_of(tenant: str) -> str:
    """A tenant's cache scope: its name, or a new random string for a call without tenant."""
    return token_hex() if tenant == NO_TENANT else tenant
