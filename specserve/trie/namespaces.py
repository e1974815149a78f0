"""Namespaces: names for groups of requests that share a draft memory.

A name has two halves: one for the model, tokenizer and adapter, one for the tenant. All text of a
tenant, under any model, is found by the second half alone.
"""

from __future__ import annotations

from hashlib import blake2b

_DIGEST_BYTES = 8


def namespace(model_identity: str, adapter: str = "", tenant: str = "") -> str:
    """The namespace of a request's tokens: 32 hexadecimal digits, hashes of the names.

    Args:
        model_identity: see :func:`specserve.engine.checkpoint.model_identity`.
        adapter: name of the request's LoRA adapter; empty for none.
        tenant: name of the tenant; empty if tenants share a memory, or if there are none.
    """
    return _digest(model_identity, adapter) + _digest(tenant)


def tenant_half(tenant: str) -> str:
    """The half of the name that all namespaces of a tenant share, under any model and adapter."""
    return _digest(tenant)


def half_of(name: str) -> str:
    """The tenant's half of the namespace ``name``."""
    return name[-2 * _DIGEST_BYTES :]


def is_part_of(name: str, purged: str) -> bool:
    """Whether ``purged``, a namespace or a tenant's half of one, covers the namespace ``name``."""
    return purged in (name, half_of(name))


def label(name: str, key: bytes) -> str:
    """The label of a namespace in metrics.

    Anyone who guesses a tenant's name can compute its namespace, but not its label.

    Args:
        name: a namespace.
        key: a secret of at most 64 bytes that the replicas share; if empty, the label is the name.
    """
    if not key:
        return name
    return blake2b(name.encode(), digest_size=2 * _DIGEST_BYTES, key=key).hexdigest()


def _digest(*parts: str) -> str:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
