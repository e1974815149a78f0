"""Drafters as Ray actors that the cluster's replicas share, and how a replica finds one.

An actor returns its address with its secret: every process of the Ray cluster may use the drafter.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specserve.core.errors import EngineError, last_line_of
from specserve.core.metric_specs import OF_DRAFTERS
from specserve.core.openmp import openmp_environment
from specserve.drafters.options import FAILED_BACKOFF_S, NAME_PREFIX, DrafterOptions, serve
from specserve.drafters.ray_metrics import RayExporter
from specserve.trie.store_actor import NAMESPACE, await_drain

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""Idle seconds after which a shared drafter ends; replicas say hello several times a second."""

_CATCH_UP_S = 2.0
"""Seconds in which a process that was stopped reads the messages that wait."""

FIND_S = 5.0
"""Longest wait for a drafter's address in one attempt, in seconds; further attempts follow."""

PENDING_S = 30.0
"""Seconds without an answer before an error names the resources that the drafter reserves."""

SILENT_S = 120.0
"""Seconds without an answer before the next drafter is asked; enough to load a model."""


class Seat(NamedTuple):
    """A replica's seat at a drafter: address with secret, and how many replicas came earlier."""

    address: str
    num_before: int


class _DrafterActor:
    """A drafter's server in its own process, which Ray restarts when it ends.

    A shared drafter belongs to no single replica. It ends when idle, and leaves a draining node.
    """

    def __init__(self, options: DrafterOptions, *, is_shared: bool) -> None:
        self._server = serve(options, f"tcp://{ray.util.get_node_ip_address()}:0")
        actor = ray.get_runtime_context()
        name = actor.get_actor_name() or f"{NAME_PREFIX}{options.kind}-{actor.get_actor_id()}"
        read = partial(self._server.counters.samples, options.kind, name)
        RayExporter(OF_DRAFTERS, read, {}).start()
        if is_shared:
            for end in (self._end_when_idle, self._leave_with_the_node):
                threading.Thread(target=end, daemon=True).start()

    def seat(self, replica: str) -> Seat:
        """Assigns or keeps the replica's seat."""
        return Seat(self._server.address, self._server.seat(replica))

    def leave(self, replica: str) -> None:
        """Frees the seat of a replica that uses another drafter."""
        self._server.leave(replica)

    def _end_when_idle(self) -> None:
        while self._server.idle_s < IDLE_S:
            time.sleep(max(IDLE_S - self._server.idle_s, 0.0))
            time.sleep(_CATCH_UP_S)
        logger.warning("No replica was heard for %g s: this drafter ends", IDLE_S)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _leave_with_the_node(self) -> None:
        await_drain()
        logger.warning("This node is drained: the drafter leaves it")
        os._exit(1)  # Ray starts it again on another node


class DraftModelDrafter(_DrafterActor):
    """Serves a draft model."""


class MtpDrafter(_DrafterActor):
    """Serves an MTP module."""


_ACTORS: dict[str, Any] = {
    "draft_model": ray.remote(max_restarts=-1)(DraftModelDrafter),
    "mtp": ray.remote(max_restarts=-1)(MtpDrafter),
}


def start_beside(actor: Any, options: DrafterOptions) -> Any:
    """Starts a drafter in the bundle of rank 0, the caller, and returns its handle."""
    group = get_current_placement_group()
    assert group is not None, "shards are placed by a placement group"
    here = ray.get_runtime_context().get_node_id()
    nodes = placement_group_table(group)["bundles_to_node_id"]
    # vLLM assigns a node's bundles to its ranks in order, so rank 0 has the first one.
    own = min(bundle for bundle, node in nodes.items() if node == here)
    placed = actor.options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, own), **_reservation(options)
    )
    return placed.remote(options, is_shared=False)


def _reservation(options: DrafterOptions) -> dict[str, Any]:
    """Ray options with a drafter's resources and environment variables."""
    environment = openmp_environment(options.num_threads)
    if options.num_gpus:
        # vLLM makes all GPUs of a node visible to its shards; a shard's actors would inherit that.
        environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
    return {
        "num_cpus": options.num_cpus,
        "num_gpus": options.num_gpus,
        "resources": options.resources,
        "runtime_env": {"env_vars": environment},
    }


class SharedDrafters:
    """Asks the cluster's drafters of one kind for seats, on behalf of one replica."""

    def __init__(self, options: DrafterOptions, replica: str) -> None:
        self.options = options
        self.replica = replica
        self._index, self._unanswered = -1, None  # the drafter that was asked last, and the call

    def ask(self, index: int) -> Seat:
        """The replica's seat at drafter ``index``, which is started if it does not exist.

        At most one call is pending, because Ray would queue further ones.

        Raises:
            GetTimeoutError: no answer came within ``FIND_S`` seconds.
            RayError: the drafter is not there or has died; ActorDiedError: it could not be loaded.
            ValueError: Ray refuses the resources.
        """
        call = self._unanswered if index == self._index else None
        if call is None:
            call = self._start(index).seat.remote(self.replica)
        self._index, self._unanswered = index, None
        try:
            seat: Seat = ray.get(call, timeout=FIND_S)
        except GetTimeoutError:
            self._unanswered = call
            raise
        return seat

    def leave(self, index: int) -> None:
        """Frees the seat if the drafter still exists; otherwise the seat expires later."""
        with suppress(ValueError, RayError):
            ray.get_actor(self.options.name(index), NAMESPACE).leave.remote(self.replica)

    def _start(self, index: int) -> Any:
        """Finds or starts a drafter's actor, which outlives the caller; returns its handle."""
        actor = _ACTORS[self.options.kind].options(
            name=self.options.name(index),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            **_reservation(self.options),
        )
        return actor.remote(self.options, is_shared=True)


class OwnDrafter(SharedDrafters):
    """A replica's own drafter in rank 0's bundle, where Ray also restarts it.

    Use it only from rank 0's process.
    """

    _actor: Any = None

    def ask(self, index: int) -> Seat:
        """The only seat; see :meth:`SharedDrafters.ask`."""
        try:
            return super().ask(index)
        except ActorDiedError:
            self._actor = None  # it could not load its model, so Ray does not restart it
            raise

    def _start(self, index: int) -> Any:
        if self._actor is None:
            self._actor = start_beside(_ACTORS[self.options.kind], self.options)
        return self._actor


class DrafterFinder:
    """Finds a replica's drafter through Ray; for one thread of a process connected to Ray.

    It takes the drafter with the fewest earlier replicas, and stops at the first that has none. The
    search starts at a hash of the replica's name, so replicas start at different drafters. It waits
    for a drafter that loads its model; otherwise all would take the one that is ready first.

    Args:
        drafters: asks them on behalf of the replica.
        num_actors: number of drafters.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        drafters: SharedDrafters,
        num_actors: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafters = drafters
        self._num_actors = num_actors
        self._seats: dict[int, Seat | None] = {}  # of the drafters asked so far; None: no answer
        self._index = crc32(drafters.replica.encode()) % num_actors
        self._clock = clock
        self._rest_until = 0.0
        self._silent_since: float | None = None
        self._reported: set[str] = set()

    def __call__(self) -> str | None:
        """The drafter's address; None: not known yet.

        Raises:
            EngineError: why no address is known; raised once per reason until one is. The next
                call continues the search.
        """
        while (began := self._clock()) >= self._rest_until:
            try:
                seat = self._drafters.ask(self._index)
            except (RayError, ValueError) as error:
                self._note_failure(error, began)
                break
            self._reported.clear()
            self._seats[self._index] = seat
            if not seat.num_before or len(self._seats) == self._num_actors:
                return self._best()
            self._move_on()
        return None

    def _note_failure(self, error: Exception, began: float) -> None:
        if isinstance(error, ActorDiedError):
            self._rest_until = self._clock() + FAILED_BACKOFF_S
            self._give_up()
        elif isinstance(error, RayTaskError):  # it runs, but gives no seats
            self._give_up()
        else:
            self._wait(began)
        # A time-out alone is no error: the drafter may be starting. `_wait` reports a long silence.
        if not isinstance(error, GetTimeoutError):
            self._report(last_line_of(error)[:300])

    def _best(self) -> str:
        """Address of the best seat; frees the other seats."""
        seats = self._given()
        self._index = _least_used(seats)
        self._silent_since = None
        self._seats.clear()
        best = seats.pop(self._index)
        for index in seats:
            self._drafters.leave(index)
        return best.address

    def _given(self) -> dict[int, Seat]:
        """The seats of the drafters that answered."""
        return {index: seat for index, seat in self._seats.items() if seat is not None}

    def _wait(self, began: float) -> None:
        """Handles a missing answer since ``began``: reports a long silence, then gives up."""
        if self._silent_since is None:
            self._silent_since = began
        silent_s = self._clock() - self._silent_since
        if silent_s >= SILENT_S:
            self._give_up()
        elif silent_s >= PENDING_S:
            options = self._drafters.options
            self._report(
                f"it has not answered for {PENDING_S:g} s; it loads its model, or no node has free "
                f"what it asks for: num_cpus {options.num_cpus:g}, num_gpus {options.num_gpus:g}, "
                f"resources {options.resources}"
            )

    def _give_up(self) -> None:
        """Marks the drafter that was asked last as unavailable, and moves on to the next."""
        self._seats[self._index] = None
        self._move_on()
        if len(self._seats) < self._num_actors:
            return
        if given := self._given():
            self._index = _least_used(given)  # asked again, as its address may be old
        else:
            self._seats.clear()

    def _move_on(self) -> None:
        self._index = (self._index + 1) % self._num_actors
        self._silent_since = None

    def _report(self, reason: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            raise EngineError(reason)


def _least_used(seats: Mapping[int, Seat]) -> int:
    """The drafter whose seat has the fewest earlier replicas."""
    return min(seats, key=lambda index: seats[index].num_before)
