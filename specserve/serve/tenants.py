"""API keys: which calls are answered, and to which tenant each call belongs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from specserve.core.config import ApiKeyConfig
from specserve.core.errors import ConfigError
from specserve.engine.tenants import CURRENT_TENANT
from specserve.serve.paths import path_of

_OPEN_PATHS = ("/health", "/metrics", "/speculation")
_POLICY_VIOLATION = 1008


ApiKeys = Mapping[bytes, str]
"""Maps the SHA-256 digest of each API key to its tenant. The keys themselves are not stored."""


def read_keys(configured: Sequence[ApiKeyConfig], environment: Mapping[str, str]) -> ApiKeys:
    """Reads the keys from their environment variables.

    Raises:
        ConfigError: a variable is missing or empty, or its key is not visible ASCII or is used
            twice. The message names the variable and never the key.
    """
    keys: dict[bytes, str] = {}
    for index, each in enumerate(configured):
        field = f"http.api_keys.{index}.env"
        key = environment.get(each.env, "")
        if not key:
            state = "empty" if each.env in environment else "not set"
            raise ConfigError(
                field,
                each.env,
                f"a variable that holds the key, on every node: here it is {state}",
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(field, each.env, "a variable with a key of visible ASCII characters")
        digest = _digest(key)
        if digest in keys:
            raise ConfigError(field, each.env, "a variable with a key that no other one holds")
        keys[digest] = each.tenant
    return keys


def label_key(keys: ApiKeys) -> bytes:
    """Returns a secret of 32 bytes, which all replicas derive from the keys; empty without keys.

    It keys the hashes that label namespaces in the open metrics.
    """
    if not keys:
        return b""
    return hashlib.sha256(b"labels" + b"".join(sorted(keys))).digest()


class TenantMiddleware:
    """Answers 401 to calls without a known key, and sets ``CURRENT_TENANT`` for the others.

    ``/health``, ``/metrics``, ``OPTIONS`` and ``/speculation`` need no key. The page
    ``/speculation`` holds no data, and asks for the key.

    Args:
        app: the wrapped application.
        keys: the known keys, at least one.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] not in ("http", "websocket") or _is_open(scope):
            await self._app(scope, receive, send)
            return
        presented = _bearer(scope)
        # The time of this look-up may leak the digest, but the key does not follow from it.
        tenant = None if presented is None else self._keys.get(_digest(presented))
        if tenant is None:
            await _unauthorized(scope, missing=presented is None)(scope, receive, send)
            return
        token = CURRENT_TENANT.set(tenant)
        try:
            await self._app(scope, receive, send)
        finally:
            CURRENT_TENANT.reset(token)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1")).digest()


def _is_open(scope: Scope) -> bool:
    return scope.get("method") == "OPTIONS" or path_of(scope) in _OPEN_PATHS


def _bearer(scope: Scope) -> str | None:
    """Returns the key of the header ``Authorization: Bearer KEY``; None without such a header."""
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _unauthorized(scope: Scope, *, missing: bool) -> ASGIApp:
    if scope["type"] == "websocket":
        return WebSocketClose(_POLICY_VIOLATION)
    message = (
        "No API key was sent; send one in the header `Authorization: Bearer KEY`"
        if missing
        else "The API key is not known here"
    )
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    return JSONResponse({"error": error}, 401, headers={"WWW-Authenticate": "Bearer"})
