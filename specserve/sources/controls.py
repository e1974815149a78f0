"""Reads the speculation options of a request from its ``vllm_xargs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from specserve.core.errors import RequestError
from specserve.core.source_config import MAX_DRAFT_TOKENS
from specserve.core.types import RequestControls

_KEYS = ("speculation", "max_draft_tokens", "learn", "report")

BEAM_KEY = "beam_sample"
"""Key of a request's extra arguments: 1 samples the beams of a beam search."""

PREDICTION_KEY = "prediction"
"""Key of a request's extra arguments: the client's predicted answer as text. The server replaces it
with the token ids as bytes of int32, which no client can send."""

SERVER_PREFIX = "specserve_"
"""Prefix of keys that only the server may add to a request's extra arguments."""

TENANT_KEY = f"{SERVER_PREFIX}tenant"
"""Key by which the server passes the tenant to the engine."""

SALT_KEY = f"{SERVER_PREFIX}cache_salt"
"""Key by which the server passes the client's own ``cache_salt`` to the engine."""

REASONING_KEY = f"{SERVER_PREFIX}reasoning"
"""Key by which the server passes what the source ``grammar`` needs to know of the reasoning."""

NO_TENANT = "-"
"""Tenant of a request without a tenant while API keys are configured. No configured tenant has this
name. Nothing is learned from such a request, and it shares no text with others."""


def parse_controls(
    extra_args: Mapping[str, object] | None, kinds: Sequence[str] | None
) -> RequestControls:
    """The controls of a request; keys of other components are ignored.

    Args:
        extra_args: the request's ``vllm_xargs``; JSON values.
        kinds: kinds of the configured sources; None: vLLM drafts itself and takes no controls.

    Raises:
        RequestError: a value is not allowed; names the field, the value and what is allowed.
    """
    if not extra_args:
        return RequestControls()
    _integer(extra_args, BEAM_KEY, 1, 0)
    if kinds is None:
        for key in _KEYS:
            if key in extra_args:
                nothing = "nothing: vLLM drafts by a method of its own (placement: in_engine)"
                raise RequestError(f"vllm_xargs.{key}", extra_args[key], nothing)
        return RequestControls()
    speculation = extra_args.get("speculation", "auto")
    allowed = ("auto", "off", *kinds)
    if not isinstance(speculation, str) or speculation not in allowed:
        raise RequestError("vllm_xargs.speculation", speculation, ", ".join(allowed))
    prediction = extra_args.get(PREDICTION_KEY)
    return RequestControls(
        speculation,
        _integer(extra_args, "max_draft_tokens", MAX_DRAFT_TOKENS, -1),
        learn=bool(_integer(extra_args, "learn", 1, 1)),
        report=bool(_integer(extra_args, "report", 1, 0)),
        prediction=prediction if isinstance(prediction, bytes) else b"",
    )


def own_fields(extra_args: Mapping[str, object]) -> dict[str, object]:
    """The entries of a request's ``vllm_xargs`` that control speculation."""
    return {key: extra_args[key] for key in _KEYS if key in extra_args}


def wants_report(extra_args: Mapping[str, object] | None) -> bool:
    """Whether a request asks for a report on speculation in its answer."""
    return extra_args is not None and extra_args.get("report") == 1


def samples_beams(extra_args: Mapping[str, object] | None) -> bool:
    """Whether the beams of a beam search are sampled."""
    return extra_args is not None and extra_args.get(BEAM_KEY) == 1


def wants_drafts(controls: RequestControls, kind: str) -> bool:
    """Whether a request takes drafts of the source ``kind``."""
    return controls.speculation in ("auto", kind) and controls.max_draft_tokens != 0


def refuse_server_keys(extra_args: Mapping[str, object]) -> None:
    """Raises RequestError if a client sends a key that only the server may add."""
    for key, value in extra_args.items():
        if key.startswith(SERVER_PREFIX):
            allowed = "nothing: only the server may set this key"
            raise RequestError(f"vllm_xargs.{key}", value, allowed)


def with_tenant(
    controls: RequestControls, extra_args: Mapping[str, object] | None
) -> RequestControls:
    """The controls with the tenant and the salt that the server passed to the engine.

    For the engine's process, if API keys are configured.
    """
    extra_args = extra_args or {}
    tenant = extra_args.get(TENANT_KEY)
    if not isinstance(tenant, str) or tenant == NO_TENANT:
        return replace(controls, tenant=NO_TENANT, learn=False)
    return replace(controls, tenant=tenant, cache_salt=str(extra_args.get(SALT_KEY, "")))


def _integer(extra_args: Mapping[str, object], key: str, high: int, default: int) -> int:
    """An integer 0 .. high. ``4.0`` is accepted, as some clients send integers so in JSON.

    If ``high`` is 1, false and true are accepted too.
    """
    if key not in extra_args:
        return default
    value = extra_args[key]
    if (isinstance(value, float) and value.is_integer()) or (high == 1 and isinstance(value, bool)):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
        allowed = "0 or 1" if high == 1 else f"an integer 0 .. {high}"
        raise RequestError(f"vllm_xargs.{key}", extra_args[key], allowed)
    return value
