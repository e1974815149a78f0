"""How a replica chooses among the cluster's drafters, with fake actors."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from specserve.core.errors import EngineError
from specserve.drafters import actor as module
from specserve.drafters.actor import (
    FIND_S,
    IDLE_S,
    PENDING_S,
    SILENT_S,
    DrafterFinder,
    Seat,
    SharedDrafters,
    _DrafterActor,
)
from specserve.drafters.options import FAILED_BACKOFF_S
from specserve.trie.store_actor import NAMESPACE
from tests.drafters.options import options_of

OPTIONS = replace(options_of("m"), num_cpus=0.5, num_gpus=1.0, resources={"drafters": 1.0})
NUM_ACTORS = 3
LOADING = GetTimeoutError("not ready")


class Actors:
    """Fake drafter actors that answer with their number or fail, and a fake clock."""

    def __init__(self) -> None:
        self.errors: list[Exception | None] = [None] * NUM_ACTORS
        self.seats: list[list[str]] = [[] for _ in range(NUM_ACTORS)]
        self.asked: list[int] = []
        self.reasons: list[str] = []
        self.now = 1000.0

    def ask(self, index: int, replica: str) -> Seat:
        self.asked.append(index)
        error = self.errors[index]
        if error is None:
            seats = self.seats[index]
            if replica not in seats:
                seats.append(replica)
            return Seat(str(index), seats.index(replica))
        if isinstance(error, GetTimeoutError):
            self.now += FIND_S
        raise error

    def finder(self, replica: str = "replica") -> DrafterFinder:
        return DrafterFinder(Drafters(self, replica), NUM_ACTORS, lambda: self.now)

    def pass_time(self, find: DrafterFinder, seconds: float) -> None:
        """Asks every second for at least ``seconds``."""
        end = self.now + seconds
        while self.now < end:
            try:
                assert find() is None
            except EngineError as error:
                self.reasons.append(str(error))
            self.now += 1.0


class Drafters(SharedDrafters):
    """A replica's handle to the fake actors."""

    def __init__(self, actors: Actors, replica: str) -> None:
        super().__init__(OPTIONS, replica)
        self._actors = actors

    def ask(self, index: int) -> Seat:
        return self._actors.ask(index, self.replica)

    def leave(self, index: int) -> None:
        self._actors.seats[index].remove(self.replica)


@pytest.fixture
def actors() -> Actors:
    return Actors()


def test_replicas_ask_different_drafters_first(actors: Actors) -> None:
    for number in range(20):
        actors.seats = [[] for _ in range(NUM_ACTORS)]
        actors.finder(f"replica {number}")()
    assert len(actors.asked) == 20  # the first replica of a drafter asks no other
    assert set(actors.asked) == set(range(NUM_ACTORS))


@pytest.mark.parametrize("num_replicas", [2, 3, 7, 30])
def test_replicas_share_the_drafters_evenly(actors: Actors, num_replicas: int) -> None:
    finders = [actors.finder(f"replica {number}") for number in range(num_replicas)]
    found = [finder() for finder in finders]
    counts = Counter(found)
    assert max(counts.values()) - min(counts[str(index)] for index in range(NUM_ACTORS)) <= 1
    assert [finder() for finder in finders] == found  # each replica keeps its seat


def test_a_second_seat_is_taken_if_other_drafters_do_not_answer(actors: Actors) -> None:
    first = actors.finder("replica 1")()
    assert first is not None
    actors.errors = [LOADING] * NUM_ACTORS
    actors.errors[int(first)] = None
    late = next(
        finder
        for number in range(2, 100)
        if crc32((name := f"replica {number}").encode()) % NUM_ACTORS == int(first)
        for finder in [actors.finder(name)]
    )
    actors.pass_time(late, (NUM_ACTORS - 1) * SILENT_S)
    while (address := late()) is None:
        actors.now += 1.0
    assert address == first


def test_the_only_drafter_that_answers_is_taken_when_all_others_were_given_up(
    actors: Actors,
) -> None:
    live = (crc32(b"replica") + 1) % NUM_ACTORS  # the search passes it on its way to the last one
    actors.seats[live] = ["earlier"]
    actors.errors = [LOADING] * NUM_ACTORS
    actors.errors[live] = None
    find, began, address = actors.finder(), actors.now, None
    while address is None:
        with suppress(EngineError):  # why it waits
            address = find()
        actors.now += 1.0
    assert address == str(live)
    assert actors.now - began < (NUM_ACTORS - 1) * (SILENT_S + 2 * FIND_S)


def test_a_drafter_that_gives_no_seats_is_left_at_once(actors: Actors) -> None:
    find = actors.finder()
    first = find()
    assert first is not None
    actors.errors[int(first)] = RayTaskError("seat", "its model call has not ended", EngineError())
    with pytest.raises(EngineError):
        find()
    second = find()
    assert second is not None
    assert second != first


def test_a_replica_waits_for_its_drafter_to_load(actors: Actors) -> None:
    find = actors.finder()
    first = find()
    assert first is not None
    actors.errors[int(first)] = LOADING
    actors.pass_time(find, SILENT_S - 2 * FIND_S)
    actors.errors[int(first)] = None
    assert find() == first


def test_the_next_drafter_is_asked_if_one_stays_silent(actors: Actors) -> None:
    actors.errors = [LOADING] * NUM_ACTORS
    find = actors.finder()
    actors.pass_time(find, NUM_ACTORS * (SILENT_S + 2 * FIND_S))
    assert set(actors.asked) == set(range(NUM_ACTORS))


@pytest.mark.parametrize("error", [ActorUnavailableError("gone", None), ValueError("no such type")])
def test_a_transient_error_keeps_the_drafter(actors: Actors, error: Exception) -> None:
    actors.errors = [error] * NUM_ACTORS
    find = actors.finder()
    actors.pass_time(find, SILENT_S / 2)
    assert len(set(actors.asked)) == 1


def test_a_dead_drafter_is_replaced_by_the_next_after_a_back_off(actors: Actors) -> None:
    find = actors.finder()
    first = find()
    assert first is not None
    actors.errors[int(first)] = ActorDiedError()
    with pytest.raises(EngineError, match="died"):
        find()
    num_asked = len(actors.asked)
    actors.pass_time(find, FAILED_BACKOFF_S)
    assert len(actors.asked) == num_asked
    assert find() not in (None, first)


def test_an_unplaced_drafter_is_reported_once_with_its_resources(actors: Actors) -> None:
    actors.errors = [LOADING] * NUM_ACTORS
    find = actors.finder()
    actors.pass_time(find, PENDING_S - 2 * FIND_S)
    assert not actors.reasons
    actors.pass_time(find, 3 * SILENT_S)
    assert actors.reasons == [
        "it has not answered for 30 s; it loads its model, or no node has free what it asks for: "
        "num_cpus 0.5, num_gpus 1, resources {'drafters': 1.0}"
    ]


def test_a_silent_drafter_has_one_pending_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    answers = iter([LOADING, LOADING, Seat("there", 0), Seat("there again", 0)])

    def seat(replica: str) -> int:
        calls.append(replica)
        return len(calls)

    def get(call: int, timeout: float) -> Any:
        assert (call, timeout) == (len(calls), FIND_S)
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    actor = SimpleNamespace(seat=SimpleNamespace(remote=seat))
    drafters = SharedDrafters(OPTIONS, "replica")
    monkeypatch.setattr(drafters, "_start", lambda index: actor)
    for _ in range(2):
        with pytest.raises(GetTimeoutError):
            drafters.ask(0)
    assert drafters.ask(0).address == "there"
    assert len(calls) == 1
    assert drafters.ask(0).address == "there again"
    assert len(calls) == 2


class IdleServer:
    """A drafter's server that hears from its replicas at these times, in seconds."""

    HELLOS = (0.0, 30.0, 80.0)
    now = 0.0

    @property
    def idle_s(self) -> float:
        return self.now - max(each for each in self.HELLOS if each <= self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_drafter_ends_a_minute_after_the_last_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    server = IdleServer()
    killed: list[tuple[str, bool]] = []
    monkeypatch.setattr("specserve.drafters.actor.time.sleep", server.sleep)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="itself"))
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append((actor, no_restart)))
    drafter = _DrafterActor.__new__(_DrafterActor)
    vars(drafter)["_server"] = server
    drafter._end_when_idle()
    assert killed == [("itself", True)]
    assert IDLE_S <= server.idle_s <= IDLE_S + 5.0
    assert server.now > server.HELLOS[-1]


def test_a_drafter_ends_when_its_node_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    monkeypatch.setattr(module, "await_drain", lambda: events.append("drained"))
    monkeypatch.setattr(os, "_exit", events.append)
    _DrafterActor.__new__(_DrafterActor)._leave_with_the_node()
    assert events == ["drained", 1]


def test_a_drafter_reserves_what_its_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def start(**options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(remote=lambda *_, is_shared: is_shared)

    monkeypatch.setitem(module._ACTORS, "draft_model", SimpleNamespace(options=start))
    assert SharedDrafters(OPTIONS, "replica")._start(2) is True
    assert asked[0].pop("runtime_env")
    assert asked == [
        {
            "name": OPTIONS.name(2),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0.5,
            "num_gpus": 1.0,
            "resources": {"drafters": 1.0},
        }
    ]


def test_other_weights_give_another_name() -> None:
    assert OPTIONS.name(0) == replace(OPTIONS).name(0)
    assert OPTIONS.name(0) != replace(OPTIONS, content="retrained").name(0)
