"""Tells the engine whose request it is.

The HTTP side notes the tenant of the call being answered (:data:`CURRENT_TENANT`). vLLM's handlers
turn that call into requests in the same context, by whatever route and in whatever form the body
came, and send each through one method of the engine's client: there the tenant is written. So
nothing in a body has to be read or replaced, and nothing in it can choose the tenant.
"""

from __future__ import annotations

from contextvars import ContextVar
from hashlib import blake2b
from secrets import token_hex
from typing import Any

from specserve.proposers.controls import NO_TENANT, SALT_KEY, TENANT_KEY

CURRENT_TENANT: ContextVar[str] = ContextVar("specserve_tenant", default=NO_TENANT)
"""Tenant of the HTTP call being answered."""


def stamp_requests(client: Any) -> None:
    """Has every request of ``client`` say whose it is, and keep its KV cache blocks to its tenant.

    Args:
        client: the ``engine_core`` of a vLLM ``AsyncLLM``.
    """
    send = client.add_request_async

    async def stamp_and_send(request: Any) -> None:
        stamp(request, CURRENT_TENANT.get())
        await send(request)

    client.add_request_async = stamp_and_send


def stamp(request: Any, tenant: str) -> None:
    """Writes ``tenant`` into a vLLM ``EngineCoreRequest``, over what the client may have sent.

    The prefix cache would tell by its speed what other tenants have asked. vLLM reuses blocks only
    between requests of one ``cache_salt``, so tenants get different ones; a client's own salt
    still parts the tenant's requests, there and in a drafter.
    """
    params = request.sampling_params
    if params is not None:
        told = {TENANT_KEY: tenant, SALT_KEY: request.cache_salt or ""}
        params.extra_args = {**(params.extra_args or {}), **told}
    scope = token_hex() if tenant == NO_TENANT else tenant
    salt = f"{scope}\0{request.cache_salt or ''}"
    request.cache_salt = blake2b(salt.encode(), digest_size=16).hexdigest()
