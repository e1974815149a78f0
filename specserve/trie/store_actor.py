"""The store as a Ray actor of the whole cluster, and the ways to it."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import GetTimeoutError, RayTaskError

from specserve.core.errors import SpecServeError, StoreError, shorten
from specserve.trie.log_snapshot import SnapshotFile
from specserve.trie.records import ExchangeReply, ExchangeRequest
from specserve.trie.store import NAME_PREFIX, StoreOptions, StoreStats, TrieStore

logger = logging.getLogger(__name__)

NAMESPACE = "specserve"
"""Ray's namespace of the actors."""

NUM_THREADS = 8
"""Calls that an actor works on at a time: none has to wait for a snapshot to be written."""

DRAIN_CHECK_S = 1.0
"""How often an actor asks whether its node is about to go."""

CONTROL_TIMEOUT_S = 60.0
"""For what an operator asks; a large snapshot takes a while to write."""

T = TypeVar("T")

_encode = msgspec.msgpack.encode
_decode_reply = msgspec.msgpack.Decoder(ExchangeReply).decode
_decode_request = msgspec.msgpack.Decoder(ExchangeRequest).decode


class TrieStoreActor(TrieStore):
    """A store in a process of its own, started again by Ray when that ends."""

    def __init__(self, options: StoreOptions) -> None:
        super().__init__(options)
        threading.Thread(target=self._leave_with_the_node, daemon=True).start()

    def exchange_encoded(self, request: bytes) -> bytes:
        """:meth:`exchange`, of messages as bytes."""
        try:
            decoded = _decode_request(request)
        except msgspec.MsgspecError as error:
            reason = f"this draft memory cannot read the replica's call, is it as new? {error}"
            return _encode(ExchangeReply(epoch="", refused=reason))
        return _encode(self.exchange(decoded))

    def __ray_shutdown__(self) -> None:
        self.close()

    def _leave_with_the_node(self) -> None:
        """Ends the process, after a last snapshot, when its node is drained."""
        await_drain()
        logger.warning("This node is drained: the draft memory leaves it")
        self.close()
        os._exit(1)


def await_drain() -> None:
    """Returns when this actor's node is drained: the actor has to leave it then.

    Ray asks no actor to leave: a node that is stopped waits for them for half a minute, then
    kills them. On another node, if there is one, Ray starts the actor again.
    """
    context = ray.get_runtime_context()
    cluster = GcsClient(address=context.gcs_address)
    node = context.get_node_id()
    while True:
        with suppress(Exception):  # the cluster's head is away; it may come back
            if node in cluster.get_draining_nodes(timeout=CONTROL_TIMEOUT_S):
                return
        time.sleep(DRAIN_CHECK_S)


_ACTOR: Any = ray.remote(
    num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=NUM_THREADS
)(TrieStoreActor)


def get_or_start(options: StoreOptions) -> Any:
    """Handle of the store's actor, which is started where there is none; it outlives the caller."""
    actor = _ACTOR.options(
        name=options.name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        resources=options.resources,
    )
    return actor.remote(options)


class RayStoreClient:
    """A replica's way to the store, which it starts where there is none; for one thread.

    Needs a process that is connected to Ray.

    Args:
        options: of the store. The one that starts it decides.

    Raises:
        ConfigError: fsspec cannot use the snapshot's URL.
    """

    def __init__(self, options: StoreOptions) -> None:
        if options.snapshot_url:
            # So that the user is told, and not the actor's log.
            SnapshotFile(options.snapshot_file, options.fingerprint)
        self._options = options
        self._actor: Any = None
        self._unanswered: Any = None

    def exchange(self, request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        """See :class:`StoreClient`."""
        deadline = time.monotonic() + timeout_s
        try:
            if self._unanswered is not None:  # a store that hangs is not given more to do
                ray.get(self._unanswered, timeout=timeout_s)
            self._unanswered = self._store().exchange_encoded.remote(_encode(request))
            left_s = max(0.0, deadline - time.monotonic())
            content = ray.get(self._unanswered, timeout=left_s)
        except GetTimeoutError:
            raise StoreError(f"no answer within {timeout_s:g} s") from None
        except Exception as error:  # Ray has many; after each the actor is looked up again
            self._actor = self._unanswered = None
            raise StoreError(_say(error)) from error
        self._unanswered = None
        return _decode_reply(content)

    def _store(self) -> Any:
        if not ray.is_initialized():  # or Ray would start a cluster of its own
            raise StoreError("this process is not connected to Ray")
        if self._actor is None:
            self._actor = get_or_start(self._options)
        return self._actor


class RemoteStore:
    """An operator's way to a store that runs.

    Each call raises ``StoreError`` where the store does not answer, and what the store itself
    raises.

    Args:
        name: one of :func:`list_stores`.
        timeout_s: how long the store may take to answer, in seconds.
    """

    def __init__(self, name: str, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        try:
            self._actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            running = ", ".join(list_stores()) or "none"
            raise StoreError(f"no draft memory {shorten(name)} runs; running: {running}") from None

    def stats(self) -> StoreStats:
        """:meth:`TrieStore.stats`."""
        return _result(self._actor.stats.remote(), StoreStats, self._timeout_s)

    def purge(self, namespace: str) -> int:
        """:meth:`TrieStore.purge`."""
        return _result(self._actor.purge.remote(namespace), int, self._timeout_s)

    def snapshot_now(self) -> int:
        """:meth:`TrieStore.snapshot_now`."""
        return _result(self._actor.snapshot_now.remote(), int, self._timeout_s)

    def stop(self) -> None:
        """Has a last snapshot written, and ends the store for good."""
        _result(self._actor.close.remote(), type(None), self._timeout_s)
        ray.kill(self._actor, no_restart=True)


def list_stores() -> list[str]:
    """Names of the stores that run in the cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        actor["name"]
        for actor in actors
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(NAME_PREFIX)
    )


def _result(reference: Any, kind: type[T], timeout_s: float) -> T:
    try:
        result = ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise StoreError(f"no answer within {timeout_s:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, SpecServeError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise StoreError(_say(error)) from error
    assert isinstance(result, kind)
    return result


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {shorten(str(error), 200)}"
