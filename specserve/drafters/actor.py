"""Drafters as Ray actors of the whole cluster, and how a replica finds its own.

An actor tells its address with the secret of its port: who may ask Ray may ask the drafter.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.placement_group import get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specserve.core.errors import EngineError, last_line_of
from specserve.core.metric_specs import OF_DRAFTERS
from specserve.core.openmp import openmp_environment
from specserve.drafters.options import FAILED_REST_S, NAME_PREFIX, DrafterOptions, serve
from specserve.drafters.ray_metrics import RayExporter
from specserve.trie.store_actor import NAMESPACE, await_drain

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""A drafter with nothing to do for so long ends itself: a replica says hello several times a
second."""

FIND_S = 5.0
"""How long a drafter may take to say where it listens; then it is asked again."""

PENDING_S = 30.0
"""A drafter that has not answered for so long is told of, with what it asks for."""

SILENT_S = 120.0
"""After so long without an answer the next one is asked: time to load a model."""


class Seat(NamedTuple):
    """A replica's place at a drafter: where to connect to, with the secret that lets in, and how
    many replicas have used the drafter for longer.
    """

    address: str
    num_before: int


class _DrafterActor:
    """A drafter's server in a process of its own, started again by Ray when that ends.

    A shared one, which belongs to no replica, ends by itself and leaves a node that is drained.
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
        """Lets a replica in."""
        return Seat(self._server.address, self._server.seat(replica))

    def leave(self, replica: str) -> None:
        """A replica has found a better seat."""
        self._server.leave(replica)

    def _end_when_idle(self) -> None:
        while (left_s := IDLE_S - self._server.idle_s) > 0:
            time.sleep(left_s)
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
    """Handle of a new actor in the bundle of rank 0, which calls this; it ends with rank 0."""
    group = get_current_placement_group()
    assert group is not None, "shards are placed by a placement group"
    here = ray.get_runtime_context().get_node_id()
    nodes = placement_group_table(group)["bundles_to_node_id"]
    # vLLM gives a node's bundles to its ranks in their order.
    own = min(bundle for bundle, node in nodes.items() if node == here)
    placed = actor.options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, own), **_reservation(options)
    )
    return placed.remote(options, is_shared=False)


def _reservation(options: DrafterOptions) -> dict[str, Any]:
    """What Ray gives a drafter."""
    environment = openmp_environment(options.num_threads)
    if options.num_gpus:
        # vLLM has Ray show a shard all GPUs of its node, and what a shard starts inherits that.
        environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
    return {
        "num_cpus": options.num_cpus,
        "num_gpus": options.num_gpus,
        "resources": options.resources,
        "runtime_env": {"env_vars": environment},
    }


class SharedDrafters:
    """The cluster's drafters of one kind, as a replica of this name asks them for its seat."""

    def __init__(self, options: DrafterOptions, replica: str) -> None:
        self.options = options
        self.replica = replica
        self._index, self._unanswered = -1, None  # the drafter that was asked last, and the call

    def ask(self, index: int) -> Seat:
        """The replica's seat at the drafter of this number, which is started where there is none.

        One call at a time: Ray keeps those that wait.

        Raises:
            GetTimeoutError: it did not tell within ``FIND_S`` seconds.
            RayError: there is none, or it has died; ActorDiedError: while it was loaded.
            ValueError: Ray does not take what it asks for.
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
        """Gives a seat back, where the drafter is still there; it would expire, too."""
        with suppress(ValueError, RayError):
            ray.get_actor(self.options.name(index), NAMESPACE).leave.remote(self.replica)

    def _start(self, index: int) -> Any:
        """Handle of a drafter's actor, which outlives the caller."""
        actor = _ACTORS[self.options.kind].options(
            name=self.options.name(index),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            **_reservation(self.options),
        )
        return actor.remote(self.options, is_shared=True)


class OwnDrafter(SharedDrafters):
    """A drafter of the replica's own in rank 0's place, also when Ray starts it again.

    For rank 0's process.
    """

    _actor: Any = None

    def ask(self, index: int) -> Seat:
        """The only seat."""
        try:
            return super().ask(index)
        except ActorDiedError:
            self._actor = None  # it could not load its model: Ray does not start it again
            raise

    def _start(self, index: int) -> Any:
        if self._actor is None:
            self._actor = start_beside(_ACTORS[self.options.kind], self.options)
        return self._actor


class DrafterFinder:
    """Asks Ray for a replica's drafter; for processes that are connected to Ray, and one thread.

    A replica takes the drafter where fewest others came before it. It begins with one that its name
    tells, so that not all begin with the same, and where it is the first it looks no further. It
    waits while a drafter loads its model: else all would end up with the one that is ready first.

    Args:
        drafters: the replica's way to them.
        num_actors: how many there are.
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
        self._told: set[str] = set()

    def __call__(self) -> str | None:
        """The drafter's address; None: it has not told it yet.

        Raises:
            EngineError: why there is none; each reason once, as long as there is no address. It is
                looked for further.
        """
        while (began := self._clock()) >= self._rest_until:
            try:
                seat = self._drafters.ask(self._index)
            except (RayError, ValueError) as error:
                self._note_failure(error, began)
                break
            self._told.clear()
            self._seats[self._index] = seat
            if not seat.num_before or len(self._seats) == self._num_actors:
                return self._best()
            self._move_on()
        return None

    def _note_failure(self, error: Exception, began: float) -> None:
        if isinstance(error, ActorDiedError):
            self._rest_until = self._clock() + FAILED_REST_S
            self._give_up()
        else:
            self._wait(began)
        # Without an answer in time it is being started, waits for its resources, or hangs.
        if not isinstance(error, GetTimeoutError):
            self._tell(last_line_of(error)[:300])

    def _best(self) -> str:
        """Where the seat is that was the best of all."""
        seats = {index: seat for index, seat in self._seats.items() if seat is not None}
        self._index = min(seats, key=lambda index: seats[index].num_before)
        self._silent_since = None
        self._seats.clear()
        best = seats.pop(self._index)
        for index in seats:
            self._drafters.leave(index)
        return best.address

    def _wait(self, began: float) -> None:
        """Notes that a drafter asked at ``began`` has not told its address."""
        if self._silent_since is None:
            self._silent_since = began
        silent_s = self._clock() - self._silent_since
        if silent_s >= SILENT_S:
            self._give_up()
        elif silent_s >= PENDING_S:
            options = self._drafters.options
            self._tell(
                f"it has not answered for {PENDING_S:g} s; it loads its model, or no node has free "
                f"what it asks for: num_cpus {options.num_cpus:g}, num_gpus {options.num_gpus:g}, "
                f"resources {options.resources}"
            )

    def _give_up(self) -> None:
        """Looks for another one than the drafter that was asked last."""
        self._seats[self._index] = None
        if len(self._seats) == self._num_actors and not any(self._seats.values()):
            self._seats.clear()
        self._move_on()

    def _move_on(self) -> None:
        self._index = (self._index + 1) % self._num_actors
        self._silent_since = None

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            raise EngineError(reason)
