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
        tenant: empty: where tenants share, or there are none.
    """
    return _digest(model_identity, adapter) + _digest(tenant)


def tenant_half(tenant: str) -> str:
    """The half that all namespaces of a tenant have in common, under any model and adapter."""
    return _digest(tenant)


def half_of(name: str) -> str:
    """The tenant's half of the namespace ``name``."""
    return name[-2 * _DIGEST_BYTES :]


def is_part_of(name: str, purged: str) -> bool:
    """Whether ``purged``, a namespace or a tenant's half of one, covers the namespace ``name``."""
    return purged in (name, half_of(name))


def shard_of(name: str, num_shards: int) -> int:
    """Which of the stores 0 .. ``num_shards - 1`` holds the namespace ``name``."""
    return int(_digest(name), 16) % num_shards


def label(name: str, key: bytes) -> str:
    """What metrics show for the namespace ``name``.

    A namespace can be computed by who guesses the tenant's name; its label cannot.

    Args:
        name: a namespace.
        key: a secret of at most 64 bytes that the replicas share; empty: the name is shown.
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
