"""Writes texts that no request has written into the cluster's draft memory."""

from __future__ import annotations

import time
from collections.abc import Iterable

from specserve.core.errors import StoreError
from specserve.core.types import Int32Array
from specserve.trie.records import StoreClient
from specserve.trie.replica import ReplicaOptions, TrieReplica
from specserve.trie.store import StoreOptions

_CALL_S, _PATIENCE_S = 10.0, 60.0
_TEXTS_AT_ONCE = 256


def write_texts(
    client: StoreClient,
    options: StoreOptions,
    namespace: str,
    texts: Iterable[tuple[Int32Array, int]],
) -> int:
    """Writes texts as a replica does that reads nothing.

    Args:
        client: the way to the store.
        options: of the store.
        namespace: whose texts they are.
        texts: tokens, int32 ``[n]``, and how many of the first ones are prompt.

    Returns:
        How many tokens the store has taken.

    Raises:
        StoreError: the store refuses, or has not answered for a minute.
    """
    replica = TrieReplica(
        client,
        lambda record: None,
        ReplicaOptions(
            fingerprint=options.fingerprint,
            vocab_size=options.vocab_size,
            max_queued_tokens=1 << 40,
            deadline_s=_CALL_S,
            reads=False,
        ),
    )
    num_tokens = 0
    for number, (tokens, num_prompt_tokens) in enumerate(texts, start=1):
        name = f"{replica.origin}-{number}"
        replica.publish(namespace, name, 0, tokens, num_prompt_tokens, final=True)
        num_tokens += len(tokens)
        if number % _TEXTS_AT_ONCE == 0:
            _send(replica)
    _send(replica)
    return num_tokens


def _send(replica: TrieReplica) -> None:
    """Sends all that waits."""
    answered_at = time.monotonic()
    while replica.has_unsent:
        rest_s = replica.take_turn()
        stats = replica.stats()
        if stats.refused:
            raise StoreError(stats.refused)
        if stats.up:
            answered_at = time.monotonic()
        elif time.monotonic() > answered_at + _PATIENCE_S:
            raise StoreError(f"the draft memory has not answered for {_PATIENCE_S:g} s")
        time.sleep(rest_s)
