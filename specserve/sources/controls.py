"""A request's own wishes: the fields of ``vllm_xargs`` that are ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from specserve.core.errors import RequestError
from specserve.core.source_config import MAX_DRAFT_TOKENS
from specserve.core.types import RequestControls

_KEYS = ("speculation", "max_draft_tokens", "learn", "report")

BEAM_KEY = "beam_sample"
"""Where, among a request's extra arguments, a beam search is asked to draw its beams."""

PREDICTION_KEY = "prediction"
"""Where, among a request's extra arguments, a client predicts its answer in words. The server puts
the token ids in their place, bytes of int32, which no client can send."""

SERVER_PREFIX = "specserve_"
"""How keys among a request's extra arguments begin that no client may give."""

TENANT_KEY = f"{SERVER_PREFIX}tenant"
"""Where, among a request's extra arguments, the server tells the engine the tenant."""

SALT_KEY = f"{SERVER_PREFIX}cache_salt"
"""Where, among them, the server tells the engine the client's own ``cache_salt``."""

NO_TENANT = "-"
"""Tenant of a request that came without one although API keys are configured. No tenant is called
so, and nothing is learned for it: it sees no one's text and no one sees its."""


def parse_controls(
    extra_args: Mapping[str, object] | None, kinds: Sequence[str] | None
) -> RequestControls:
    """Reads the fields of ``vllm_xargs`` that are ours; other keys belong to others.

    Args:
        extra_args: the request's ``vllm_xargs``; JSON values.
        kinds: kinds of the configured sources; None: vLLM drafts itself, and takes no controls.

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
    """Those of a request's ``vllm_xargs`` that are controls of speculation."""
    return {key: extra_args[key] for key in _KEYS if key in extra_args}


def wants_report(extra_args: Mapping[str, object] | None) -> bool:
    """Whether a request's answer is to tell what speculation did."""
    return extra_args is not None and extra_args.get("report") == 1


def samples_beams(extra_args: Mapping[str, object] | None) -> bool:
    """Whether a beam search is to draw its beams."""
    return extra_args is not None and extra_args.get(BEAM_KEY) == 1


def wants_drafts(controls: RequestControls, kind: str) -> bool:
    """Whether a request takes drafts of a kind of source."""
    return controls.speculation in ("auto", kind) and controls.max_draft_tokens != 0


def refuse_server_keys(extra_args: Mapping[str, object]) -> None:
    """Raises RequestError where a client gives what the server tells the engine, as its tenant."""
    for key, value in extra_args.items():
        if key.startswith(SERVER_PREFIX):
            allowed = "nothing: the server tells the engine by this key, as the API key's tenant"
            raise RequestError(f"vllm_xargs.{key}", value, allowed)


def with_tenant(
    controls: RequestControls, extra_args: Mapping[str, object] | None
) -> RequestControls:
    """The controls with the tenant and the salt that the server handed to the engine.

    For the engine's side, with API keys configured.
    """
    extra_args = extra_args or {}
    tenant = extra_args.get(TENANT_KEY)
    if not isinstance(tenant, str) or tenant == NO_TENANT:
        return replace(controls, tenant=NO_TENANT, learn=False)
    return replace(controls, tenant=tenant, cache_salt=str(extra_args.get(SALT_KEY, "")))


def _integer(extra_args: Mapping[str, object], key: str, high: int, default: int) -> int:
    """An integer 0 .. high. ``4.0`` counts: JSON has one kind of number, and clients send both.

    Of 0 and 1, false and true count too.
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
