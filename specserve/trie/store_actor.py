"""The store as a detached Ray actor, and the clients that call it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from specserve.core.errors import SpecServeError, StoreError, last_line_of, shorten
from specserve.trie.log_snapshot import SnapshotFile
from specserve.trie.records import ExchangeReply, ExchangeRequest
from specserve.trie.store import NAME_PREFIX, StoreOptions, StoreStats, TrieStore

logger = logging.getLogger(__name__)

NAMESPACE = "specserve"
"""Ray namespace of the actors."""

NUM_THREADS = 8
"""Calls that an actor runs at a time, so that none waits while a snapshot is written."""

DRAIN_CHECK_S = 1.0
"""Time between two checks whether the actor's node is drained, in seconds."""

CONTROL_TIMEOUT_S = 60.0
"""Timeout of an operator's call, in seconds; a large snapshot takes a while to write."""

T = TypeVar("T")

_encode = msgspec.msgpack.encode
_decode_reply = msgspec.msgpack.Decoder(ExchangeReply).decode
_decode_request = msgspec.msgpack.Decoder(ExchangeRequest).decode


class TrieStoreActor(TrieStore):
    """A store in its own process, which Ray restarts when it ends."""

    def __init__(self, options: StoreOptions) -> None:
        super().__init__(options)
        threading.Thread(target=self._leave_with_the_node, daemon=True).start()

    def exchange_encoded(self, request: bytes) -> bytes:
        """:meth:`exchange` with messages encoded as MessagePack."""
        try:
            decoded = _decode_request(request)
        except msgspec.MsgspecError as error:
            reason = f"cannot read the replica's call; its version may be another one: {error}"
            return _encode(ExchangeReply(epoch="", refused=reason))
        return _encode(self.exchange(decoded))

    def __ray_shutdown__(self) -> None:
        self.close()

    def _leave_with_the_node(self) -> None:
        """Writes a last snapshot and ends the process when its node is drained."""
        await_drain()
        logger.warning("This node is drained: the draft memory leaves it")
        self.close()
        os._exit(1)


def await_drain(nodes: Iterable[str] = ()) -> None:
    """Returns when one of these nodes, by default this actor's, is drained.

    Ray does not tell actors about a drain. A node that stops waits half a minute for its actors and
    kills them. Ray restarts an actor that has ended on another node, if there is one.
    """
    context = ray.get_runtime_context()
    cluster = GcsClient(address=context.gcs_address)
    awaited = set(nodes) or {context.get_node_id()}
    while True:
        with suppress(Exception):  # the head node may be down and come back
            if not awaited.isdisjoint(cluster.get_draining_nodes(timeout=CONTROL_TIMEOUT_S)):
                return
        time.sleep(DRAIN_CHECK_S)


_ACTOR: Any = ray.remote(
    num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=NUM_THREADS
)(TrieStoreActor)


def get_or_start(options: StoreOptions) -> Any:
    """Handle of the store's actor; starts one if none runs. The actor outlives the caller."""
    actor = _ACTOR.options(
        name=options.name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        resources=options.resources,
    )
    return actor.remote(options)


class RayStoreClient:
    """A replica's connection to the store, which it starts if none runs; for one thread.

    The process must be connected to Ray.

    Args:
        options: options of a store that it starts; a running store keeps its own.

    Raises:
        ConfigError: fsspec cannot use the snapshot's URL.
    """

    def __init__(self, options: StoreOptions) -> None:
        if options.snapshot_url:
            # Raises an error here, where the user sees it, and not in the actor's log.
            SnapshotFile(options.snapshot_file, options.fingerprint)
        self._options = options
        self._actor: Any = None
        self._unanswered: Any = None

    def exchange(self, request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        """See :class:`StoreClient`."""
        deadline = time.monotonic() + timeout_s
        try:
            if self._unanswered is not None:  # no second call while the store hangs
                ray.get(self._unanswered, timeout=timeout_s)
            self._unanswered = self._store().exchange_encoded.remote(_encode(request))
            left_s = max(0.0, deadline - time.monotonic())
            content = ray.get(self._unanswered, timeout=left_s)
        except GetTimeoutError:
            raise StoreError(f"no answer within {timeout_s:g} s") from None
        except ActorDiedError as error:
            self._actor = self._unanswered = None
            if error.actor_init_failed:  # each further try costs a process
                return _refusal(f"the store does not start: {last_line_of(error)}")
            raise StoreError(_say(error)) from error
        except Exception as error:  # of many types in Ray; the next call looks the actor up again
            self._actor = self._unanswered = None
            raise StoreError(_say(error)) from error
        self._unanswered = None
        try:
            return _decode_reply(content)
        except msgspec.MsgspecError:
            return _refusal("cannot read the store's reply; its version may be another one")

    def _store(self) -> Any:
        if not ray.is_initialized():  # otherwise Ray starts a new cluster
            raise StoreError("this process is not connected to Ray")
        if self._actor is None:
            self._actor = get_or_start(self._options)
        return self._actor


class RemoteStore:
    """An operator's connection to a running store.

    Each call raises ``StoreError`` if the store does not answer, and the errors of the store.

    Args:
        name: one of :func:`list_stores`.
        timeout_s: timeout of :meth:`stats`, in seconds. The other calls write a snapshot and have
            ``CONTROL_TIMEOUT_S``.
    """

    def __init__(self, name: str, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        try:
            self._actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            running = ", ".join(list_stores()) or "none"
            raise StoreError(f"no draft memory {shorten(name)} runs; running: {running}") from None
        except RayError as error:
            raise StoreError(_say(error)) from error

    def stats(self) -> StoreStats:
        """:meth:`TrieStore.stats`."""
        return _result(self._actor.stats.remote(), StoreStats, self._timeout_s)

    def purge(self, namespace: str) -> int:
        """:meth:`TrieStore.purge`."""
        return _result(self._actor.purge.remote(namespace), int, CONTROL_TIMEOUT_S)

    def snapshot_now(self) -> int:
        """:meth:`TrieStore.snapshot_now`."""
        return _result(self._actor.snapshot_now.remote(), int, CONTROL_TIMEOUT_S)

    def stop(self) -> None:
        """Writes a last snapshot and ends the store; Ray does not restart it.

        Raises:
            SnapshotError: the snapshot could not be written, and the store runs on.
        """
        self.snapshot_now()
        ray.kill(self._actor, no_restart=True)


def list_stores() -> list[str]:
    """Names of the stores that run in the cluster, sorted.

    Raises:
        StoreError: the cluster does not answer.
    """
    try:
        actors = ray.util.list_named_actors(all_namespaces=True)
    except RayError as error:
        raise StoreError(_say(error)) from error
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
    except RayError as error:
        raise StoreError(_say(error)) from error
    assert isinstance(result, kind)
    return result


def _refusal(reason: str) -> ExchangeReply:
    return ExchangeReply("", refused=reason)


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {shorten(str(error), 200)}"
