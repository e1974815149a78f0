"""Namespaces: who shares a memory with whom.

A name has two halves: what the tokens mean (model, tokenizer, adapter) and whose they are. So all
that a tenant has left, under whichever model, is found by the second half alone.
"""

from __future__ import annotations

from hashlib import blake2b

_DIGEST_BYTES = 8


def namespace(model_identity: str, adapter: str = "", tenant: str = "") -> str:
    """The namespace of a request's tokens: 32 hexadecimal digits that tell no names.

    Args:
        model_identity: see :func:`specserve.engine.checkpoint.model_identity`.
        adapter: name of the request's LoRA adapter; empty: none.
        tenant: name of the tenant; empty: where tenants share, or there are none.
    """
    return _digest(model_identity, adapter) + _digest(tenant)


def is_of_tenant(name: str, tenant: str) -> bool:
    """Whether the namespace ``name`` is one of ``tenant``'s, under any model or adapter."""
    return name.endswith(_digest(tenant))


def shard_of(name: str, num_shards: int) -> int:
    """Which of the stores 0 .. ``num_shards - 1`` holds the namespace ``name``."""
    return int(_digest(name), 16) % num_shards


def _digest(*parts: str) -> str:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
