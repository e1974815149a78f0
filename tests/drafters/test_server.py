from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import numpy as np
import pytest

from specserve.core.errors import EngineError
from specserve.drafters.schedule import FEED_TOKENS
from specserve.drafters.server import (
    MAX_FAILURES,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    REPLICA_SILENT_S,
    DrafterServer,
)
from specserve.wire.frames import encode
from specserve.wire.messages import (
    DraftAnswer,
    Greeting,
    Hello,
    Refusal,
    RowAnswer,
    TextRow,
)
from tests.drafters.client import TEXT, Client, row
from tests.drafters.fakes import VOCAB_SIZE, WAIT_S, FakeDrafter, draft_of
from tests.integration.cluster import eventually


@pytest.fixture
def drafter() -> Iterator[FakeDrafter]:
    drafter = FakeDrafter()
    yield drafter
    drafter.may_go.set()


@pytest.fixture
def server(drafter: FakeDrafter) -> Iterator[DrafterServer]:
    with closing(DrafterServer(drafter)) as server:
        yield server
        drafter.may_go.set()
    drafter.assert_called_rightly()


@pytest.fixture
def connect(server: DrafterServer) -> Iterator[Callable[[bytes], Client]]:
    clients: list[Client] = []

    def connect(name: bytes) -> Client:
        clients.append(Client(server, name))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


Connect = Callable[[bytes], Client]


def hold(drafter: FakeDrafter, client: Client) -> None:
    """Blocks the drafter until ``may_go`` is set, so that later requests wait."""
    drafter.may_go.clear()
    drafter.entered.clear()
    client.request(row(0, 3))
    assert drafter.entered.wait(WAIT_S)


def test_a_hello_gets_the_card(connect: Connect) -> None:
    client = connect(b"a")
    client.send(Hello(7))
    greeting = client.receive()
    assert isinstance(greeting, Greeting)
    assert (greeting.number, greeting.card) == (7, FakeDrafter().card)
    client.send(Hello(8))
    assert client.receive() == msgspec.structs.replace(greeting, number=8)


def test_a_replica_keeps_its_seat_while_it_sends_hellos(
    server: DrafterServer, connect: Connect
) -> None:
    assert [server.seat(name) for name in ("first", "second", "first")] == [0, 1, 0]
    for name in ("first", "second"):
        server._seats[name] -= REPLICA_SILENT_S
    connect(b"a").ping("second")
    assert server.seat("third") == 1
    assert server.seat("second") == 0
    connect(b"b").ping("unknown")
    assert server.seat("third") == 1
    server.leave("second")
    assert server.seat("third") == 0


def test_a_growing_text_gets_drafts_from_its_new_tokens(connect: Connect) -> None:
    client = connect(b"a")
    assert client.ask(row(1, 50)) == (RowAnswer(50, draft_of(TEXT[:50].tolist(), 2), b"\xff\xff"),)
    assert client.ask(row(1, 53, start=50, draft=4)) == (
        RowAnswer(53, draft_of(TEXT[:53].tolist(), 4), b"\xff" * 4),
    )


def test_a_text_that_is_not_held_gets_held_0(connect: Connect) -> None:
    assert connect(b"a").ask(row(1, 53, start=50)) == (RowAnswer(0),)


def arrive(server: DrafterServer, drafter: FakeDrafter, number: int) -> None:
    """Waits until ``number`` requests wait for the drafter.

    ZeroMQ does not count its waiting messages, so the server's thread reads them early.
    """
    drafter.meanwhile = lambda: server._arrivals.extend(server._router.get(0.0))
    eventually(lambda: len(server._arrivals) == number, "questions", WAIT_S, 0.001)


def test_waiting_requests_of_several_clients_share_a_call(
    server: DrafterServer, connect: Connect, drafter: FakeDrafter
) -> None:
    first, second, third = connect(b"1"), connect(b"2"), connect(b"3")
    hold(drafter, first)
    second.request(row(0, 10), row(1, 11))
    third.request(row(0, 12))
    arrive(server, drafter, 2)
    drafter.may_go.set()
    assert isinstance(second.receive(), DraftAnswer)
    answer = third.receive()
    assert isinstance(answer, DraftAnswer)
    assert answer.rows == (RowAnswer(12, draft_of(TEXT[:12].tolist(), 2), b"\xff\xff"),)
    assert [len(call) for call in drafter.calls] == [1, 3]
    assert {each.key for each in drafter.calls[1]} == {(b"2", 0), (b"2", 1), (b"3", 0)}


def computed(drafter: FakeDrafter) -> list[list[int]]:
    """Number of computed positions of each row, for each call; the fake shares no prefix."""
    return [[min(len(row.tokens), row.max_feed_tokens) for row in call] for call in drafter.calls]


def test_a_draft_waits_for_one_piece_of_another_text_at_most(
    server: DrafterServer, connect: Connect, drafter: FakeDrafter
) -> None:
    client, other = connect(b"a"), connect(b"b")
    drafter.may_go.clear()
    client.request(row(1, 5000, draft=0))
    assert drafter.entered.wait(WAIT_S)
    other.request(row(1, 10))
    arrive(server, drafter, 1)
    drafter.may_go.set()
    assert isinstance(other.receive(), DraftAnswer)
    answer = client.receive()
    assert isinstance(answer, DraftAnswer)
    assert answer.rows == (RowAnswer(5000),)
    sizes = computed(drafter)
    assert sizes[:3] == [[FEED_TOKENS], [10], [FEED_TOKENS]]
    assert len(sizes) - 1 == -(-5000 // FEED_TOKENS)


def test_a_long_text_that_wants_a_draft_gets_it_after_its_last_piece(
    connect: Connect, drafter: FakeDrafter
) -> None:
    (answer,) = connect(b"a").ask(row(1, 600))
    assert answer == RowAnswer(600, draft_of(TEXT[:600].tolist(), 2), b"\xff\xff")
    assert computed(drafter) == [[FEED_TOKENS], [FEED_TOKENS], [600 - 2 * FEED_TOKENS]]


def test_an_expired_request_is_not_computed(
    server: DrafterServer, connect: Connect, drafter: FakeDrafter
) -> None:
    first, late, patient = connect(b"1"), connect(b"2"), connect(b"3")
    hold(drafter, first)
    late.request(row(0, 10), budget_s=0.0)
    patient.request(row(0, 10))
    arrive(server, drafter, 2)
    drafter.may_go.set()
    assert late.refused() == "expired"
    assert isinstance(patient.receive(), DraftAnswer)
    assert [each.key[0] for call in drafter.calls for each in call] == [b"1", b"3"]
    assert server.counters.num_refused["expired"] == 1


def test_a_model_error_is_sent_to_its_clients_and_logged_once(
    server: DrafterServer,
    connect: Connect,
    drafter: FakeDrafter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = connect(b"a")
    drafter.error = MemoryError("no room")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            client.request(row(1, 10))
            assert client.refused() == "failed"
    assert caplog.text.count("no room") >= 1
    assert len(caplog.records) == 1
    drafter.error = None
    assert client.ask(row(1, 10))[0].held == 10
    assert server.counters.num_refused["failed"] == 3


def test_a_failed_batch_is_computed_in_parts(
    server: DrafterServer,
    connect: Connect,
    drafter: FakeDrafter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # a logged error would keep its arrays alive
    held_up, *clients = [connect(b"%d" % number) for number in range(4)]
    hold(drafter, held_up)
    for client, texts in zip(clients, ([0], [1], [2, 3, 4, 5]), strict=True):
        client.request(*[row(text, 10) for text in texts])
    arrive(server, drafter, 3)
    drafter.most_rows, drafter.poison = 2, {1, 4}
    drafter.may_go.set()
    one, poisoned, most = (client.receive() for client in clients)
    draft = draft_of(TEXT[:10].tolist(), 2)
    assert isinstance(one, DraftAnswer)
    assert isinstance(poisoned, Refusal)
    assert isinstance(most, DraftAnswer)
    assert [each.tokens for each in one.rows] == [draft]
    assert [each.tokens for each in most.rows] == [draft, draft, (), draft]
    assert [each.held for each in most.rows] == [10, 10, 0, 10]
    assert [each.problem for each in most.rows] == ["", "", "failed", ""]
    assert server.counters.num_refused["failed"] == 2


def test_on_broken_is_called_after_repeated_failures(drafter: FakeDrafter) -> None:
    seen: list[Exception | None] = []
    calls: list[int] = []
    errors = [MemoryError()] * (MAX_FAILURES - 1), [None], [MemoryError()] * MAX_FAILURES
    with (
        closing(DrafterServer(drafter, on_broken=lambda: calls.append(len(seen)))) as server,
        closing(Client(server)) as client,
    ):
        for error in itertools.chain(*errors):
            seen.append(error)
            drafter.error = error
            client.request(row(1, 10))
            assert isinstance(client.receive(), DraftAnswer) == (error is None)
    assert calls == [2 * MAX_FAILURES]


def test_garbage_is_counted_and_affects_no_other_client(
    server: DrafterServer, connect: Connect
) -> None:
    wild, tame = connect(b"wild"), connect(b"tame")
    for frames in ([b"nonsense"], [b""], [b"\x91\xa5hello", b"more"], encode(Refusal(1, "failed"))):
        wild.send_raw(*frames)
    assert tame.ask(row(1, 10))[0].held == 10
    eventually(lambda: server.counters.num_refused["malformed"] == 4, "all counted", WAIT_S, 0.001)
    wild.ping()


def test_tokens_and_states_that_do_not_fit_the_model_are_refused(
    server: DrafterServer, connect: Connect, drafter: FakeDrafter
) -> None:
    client = connect(b"a")
    beyond = np.array([VOCAB_SIZE], np.int32)
    states = np.zeros((1, 4), np.uint16)
    answers = client.ask(
        row(1, 10),
        TextRow(text=2, salt=0, start=0, tokens=beyond),
        TextRow(text=3, salt=0, start=0, tokens=TEXT[:2], states=states),
    )
    assert [(answer.held, answer.problem) for answer in answers] == [
        (10, ""),
        (0, "unfit"),
        (0, "unfit"),
    ]
    assert [each.key for call in drafter.calls for each in call] == [(b"a", 1)]
    assert server.counters.num_refused["unfit"] == 2


@pytest.mark.parametrize(
    ("max_bytes", "num_held"), [(MAX_WAITING_BYTES, MAX_WAITING), (5 << 10, 4)]
)
def test_a_client_that_floods_is_refused_and_the_others_are_served(
    server: DrafterServer,
    connect: Connect,
    drafter: FakeDrafter,
    monkeypatch: pytest.MonkeyPatch,
    max_bytes: int,
    num_held: int,
) -> None:
    monkeypatch.setattr("specserve.drafters.server.MAX_WAITING_BYTES", max_bytes)
    wild, tame = connect(b"wild"), connect(b"tame")
    hold(drafter, wild)
    for number in range(num_held + 5):
        wild.request(row(number, 10))
    tame.request(row(1, 10))
    arrive(server, drafter, num_held + 6)
    drafter.may_go.set()
    assert isinstance(tame.receive(), DraftAnswer)
    replies = [wild.receive() for _ in range(num_held + 6)]
    assert sum(isinstance(reply, Refusal) for reply in replies) == 5
    assert server.counters.num_refused["crowded"] == 5


def test_ended_texts_are_forgotten_with_the_next_request(
    connect: Connect, drafter: FakeDrafter
) -> None:
    client = connect(b"a")
    client.ask(row(1, 10), row(2, 10))
    client.request(row(2, 11, start=10), forget=(1,))
    assert isinstance(client.receive(), DraftAnswer)
    assert drafter.forgotten == [(b"a", 1)]
    assert client.ask(row(1, 11, start=10)) == (RowAnswer(0),)


def test_a_text_that_ends_during_its_feed_is_computed_no_further(
    server: DrafterServer, connect: Connect, drafter: FakeDrafter
) -> None:
    client = connect(b"a")
    drafter.may_go.clear()
    client.request(row(1, 5000, draft=0))
    assert drafter.entered.wait(WAIT_S)
    client.request(forget=(1,))
    arrive(server, drafter, 1)
    drafter.may_go.set()
    replies = [client.receive(), client.receive()]
    held = [reply.rows for reply in replies if isinstance(reply, DraftAnswer)]
    assert sorted(held) == [(), (RowAnswer(0),)]
    assert len(drafter.calls) == 1


def test_a_server_without_requests_becomes_idle(server: DrafterServer, connect: Connect) -> None:
    client = connect(b"a")
    client.ask(row(1, 10))
    eventually(lambda: server.idle_s > 0.3, "idle", WAIT_S, 0.01)
    sent_at = time.monotonic()
    client.ping()
    assert server.idle_s <= time.monotonic() - sent_at


def test_a_server_is_not_idle_during_a_model_call(
    server: DrafterServer, connect: Connect, drafter: FakeDrafter
) -> None:
    hold(drafter, connect(b"a"))
    assert [server.idle_s for _ in range(2)] == [0.0, 0.0]
    drafter.may_go.set()
    eventually(lambda: server.idle_s > 0.0, "idle", WAIT_S, 0.01)


def test_a_server_whose_model_call_hangs_gives_no_seats(
    server: DrafterServer,
    connect: Connect,
    drafter: FakeDrafter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert server.seat("replica") == 0
    hold(drafter, connect(b"a"))
    assert server.seat("replica") == 0
    monkeypatch.setattr("specserve.drafters.server.REPLICA_SILENT_S", 0.0)
    with pytest.raises(EngineError, match=r"its model call has not ended for 0 s"):
        server.seat("replica")
    drafter.may_go.set()
    eventually(lambda: server.idle_s > 0.0, "idle", WAIT_S, 0.01)
    assert server.seat("replica") == 0


def test_a_client_that_reconnects_under_its_name_keeps_its_texts(
    server: DrafterServer, connect: Connect
) -> None:
    connect(b"a").ask(row(1, 10))
    assert connect(b"a").ask(row(1, 12, start=10))[0].held == 12


def test_two_requests_for_one_text_are_computed_one_by_one(
    server: DrafterServer, connect: Connect, drafter: FakeDrafter
) -> None:
    other, client = connect(b"o"), connect(b"a")
    hold(drafter, other)
    client.request(row(1, 10))
    client.request(row(1, 12, start=10))
    arrive(server, drafter, 2)
    drafter.may_go.set()
    held = [
        reply.rows[0].held
        for reply in (client.receive(), client.receive())
        if isinstance(reply, DraftAnswer)
    ]
    assert held == [10, 12]


def test_close_waits_only_for_the_running_call(drafter: FakeDrafter) -> None:
    before = set(threading.enumerate())
    server = DrafterServer(drafter)
    client = Client(server)
    hold(drafter, client)
    client.request(row(2, 10))
    closing_it = threading.Thread(target=server.close)
    closing_it.start()
    closing_it.join(0.1)
    assert closing_it.is_alive()
    drafter.may_go.set()
    closing_it.join(WAIT_S)
    assert not closing_it.is_alive()
    client.close()
    assert not set(threading.enumerate()) - before
    assert len(drafter.calls) == 1


def test_close_waits_for_no_request(drafter: FakeDrafter) -> None:
    server = DrafterServer(drafter)
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < WAIT_S / 2


def test_a_turn_that_hangs_ends_the_process() -> None:
    program = """
from specserve.drafters import server
from tests.drafters.client import Client, row
from tests.drafters.fakes import FakeDrafter
server.MAX_TURN_S = 3
drafter = FakeDrafter()
serving = server.DrafterServer(drafter)
client = Client(serving)
client.request(row(1, 10))
client.receive()
drafter.may_go.clear()
client.request(row(1, 11))
serving._thread.join()
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "Timeout (0:00:03)!" in ended.stderr
