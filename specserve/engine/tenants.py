"""Tells the engine whose request it is, and what that asked of speculation.

The HTTP side notes the tenant and the speculation controls of the call being answered
(:data:`CURRENT_TENANT`, :data:`CURRENT_CONTROLS`). vLLM's handlers turn that call into requests in
the same context, by whatever route and in whatever form the body came, and send each through one
method of the engine's client: there both are written. So nothing in a body has to be read again or
replaced, nothing in it can choose the tenant, and no handler can leave the controls out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import blake2b
from secrets import token_hex
from types import MappingProxyType
from typing import Any

from specserve.sources.controls import NO_TENANT, SALT_KEY, TENANT_KEY

CURRENT_TENANT: ContextVar[str] = ContextVar("specserve_tenant", default=NO_TENANT)
"""Tenant of the HTTP call being answered."""

CURRENT_CONTROLS: ContextVar[Mapping[str, object]] = ContextVar(
    "specserve_controls", default=MappingProxyType({})
)
"""Speculation controls of the HTTP call being answered, as its ``vllm_xargs`` has them."""

_BEAM = re.compile(r"-[0-9a-f]{16}-beam-\d+$")
"""How vLLM's beam search ends the ids of its requests, one a beam and step."""

_BEAM_CONTROLS = {"speculation": "off", "learn": 0}
"""Each holds the whole text for one token more: drafts come too late, and most beams are given up
before the text that is answered is known."""


def stamp_requests(client: Any, *, with_tenants: bool) -> None:
    """Has every request of a vLLM ``engine_core`` carry its call's controls, and its tenant."""
    send = client.add_request_async

    async def stamp_and_send(request: Any) -> None:
        stamp_controls(request, CURRENT_CONTROLS.get())
        if with_tenants:
            stamp(request, CURRENT_TENANT.get())
        await send(request)

    client.add_request_async = stamp_and_send


def stamp_controls(request: Any, controls: Mapping[str, object]) -> None:
    """Writes a call's speculation controls into a vLLM ``EngineCoreRequest``.

    Some of vLLM's handlers make sampling parameters of their own, without ``vllm_xargs``.
    """
    params = request.sampling_params
    if params is None:
        return
    if _BEAM.search(request.external_req_id or ""):
        controls = _BEAM_CONTROLS
    if controls:
        params.extra_args = {**(params.extra_args or {}), **controls}


def stamp(request: Any, tenant: str) -> None:
    """Writes ``tenant`` into a vLLM ``EngineCoreRequest``, over what the client may have sent.

    The prefix cache would tell by its speed what other tenants have asked. vLLM reuses blocks only
    between requests of one ``cache_salt``, so tenants get different ones; a client's own salt
    still parts the tenant's requests, there and in a drafter.
    """
    params = request.sampling_params
    if params is not None:
        told = tenant_fields(tenant, request.cache_salt or "")
        params.extra_args = {**(params.extra_args or {}), **told}
    salt = f"{scope_of(tenant)}\0{request.cache_salt or ''}"
    request.cache_salt = blake2b(salt.encode(), digest_size=16).hexdigest()


def tenant_fields(tenant: str, cache_salt: str = "") -> dict[str, object]:
    """How extra arguments tell the engine whose a text is."""
    return {TENANT_KEY: tenant, SALT_KEY: cache_salt}


def scope_of(tenant: str) -> str:
    """What tells a tenant's things from another's; of a call without one, a new one each time."""
    return token_hex() if tenant == NO_TENANT else tenant
