"""A drafter that is late, down, wrong or replaced costs drafts and nothing else."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

import numpy as np
import pytest
import zmq

from specserve.core.errors import WireError
from specserve.core.types import Drafts
from specserve.drafters.server import DrafterServer
from specserve.sources import drafter_link, health_monitor, remote
from specserve.sources.base import Member
from specserve.sources.guard import GuardedSource
from specserve.sources.health_monitor import HELLO_DOWN_S, MAX_LOGGED_TRIPS
from specserve.sources.remote import FEED_TOKENS, NEAR_TOKENS
from specserve.wire.frames import Frame, decode_question, decode_reply, encode
from specserve.wire.messages import (
    LAST,
    DraftAnswer,
    DraftRequest,
    Greeting,
    Hello,
    Reply,
    RowAnswer,
)
from tests.drafters.fakes import VOCAB_SIZE, WAIT_S, FakeDrafter, states_of
from tests.integration.cluster import eventually
from tests.sources.remote_replica import (
    HIDDEN_SIZE,
    TEXT,
    Place,
    Replica,
    hidden_states,
    replica,
    serve,
)


@pytest.mark.parametrize("kind", ["draft_model", "mtp"])
def test_a_text_that_the_drafter_fails_to_read_is_sent_rarely_and_whole(
    stack: ExitStack, place: Place, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(remote, "BACKOFF_S", 1000.0)
    drafter = FakeDrafter(HIDDEN_SIZE if kind == "mtp" else 0)
    serve(stack, place, drafter)
    made = replica(stack, place, kind)
    made.until_up()
    made.grow("long", 2 * NEAR_TOKENS)
    states = states_of(TEXT[: 2 * NEAR_TOKENS], HIDDEN_SIZE)
    hidden = hidden_states([states], [0]) if kind == "mtp" else None
    drafter.error = MemoryError()
    assert made.propose("long", hidden=hidden) == [[]]

    def has_heard() -> bool:
        assert made.propose("long") == [[]]
        return made.health().num_errors == 1

    eventually(has_heard, "the error", WAIT_S, 0.005)
    for _ in range(5):
        assert made.propose("long") == [[]]
    assert len(drafter.calls) == 1
    drafter.error = None
    made.source._texts.rest(np.arange(2), 0.0)
    made.until_drafts("long")
    assert not drafter.begins


def test_a_drafter_error_costs_one_draft(served: Replica, drafter: FakeDrafter) -> None:
    served.grow("a", 20)
    drafter.error = MemoryError()
    assert served.propose("a") == [[]]
    drafter.error = None
    assert served.propose("a") != [[]]
    assert (served.health().num_errors, served.health().num_timeouts) == (1, 0)


def test_a_paused_drafter_causes_one_timeout_and_is_used_again_later(
    stack: ExitStack, place: Place, drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither the late answer nor the connection is given up, however long the pause is.
    monkeypatch.setattr(remote, "LOST_S", 1000.0)
    monkeypatch.setattr(health_monitor, "SILENT_S", 1000.0)
    serve(stack, place, drafter)
    stopped = replica(stack, place, timeout_s=1.0)
    stopped.until_up()
    stopped.grow("a", 20)
    stopped.until_drafts("a")
    timeouts = stopped.health().num_timeouts
    drafter.may_go.clear()
    began = time.monotonic()
    for end in range(21, 36):
        stopped.grow("a", end)
        stopped.grow(f"text {end}", 20)
        assert stopped.propose("a", f"text {end}") == [[], []]
    assert time.monotonic() - began < 10.0  # a timeout in each step would take 15 s
    assert stopped.health().num_timeouts == timeouts + 1
    eventually(lambda: not stopped.health().up, "down", WAIT_S, 0.01)
    drafter.may_go.set()
    stopped.until_drafts("a")
    eventually(lambda: stopped.health().up, "up", WAIT_S, 0.01)
    assert drafter.calls[-1][0].start >= 20  # its late answer said what it holds


def test_after_a_late_answer_no_long_text_is_sent_twice(
    stack: ExitStack, place: Place, drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_monitor, "SILENT_S", 1000.0)  # the connection is kept
    serve(stack, place, drafter)
    made = replica(stack, place, timeout_s=1.0)
    made.until_up()
    made.grow("long", 2 * FEED_TOKENS)
    made.grow("short", 20)
    drafter.may_go.clear()
    made.propose("long")
    assert drafter.entered.wait(WAIT_S)
    assert made.propose("short") == [[]]
    assert made.health().num_timeouts == 1
    drafter.may_go.set()
    made.until_drafts("long", "short")
    starts = [row.start for call in drafter.calls for row in call if row.key[1] == 0]
    assert starts == sorted(set(starts))


def test_a_drafter_that_is_always_late_is_asked_with_back_off(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    serve(stack, place, drafter)
    slow = replica(stack, place, timeout_s=0.001)
    slow.until_up()
    slow.grow("a", 20)
    rests_s = []
    for number in range(3):
        drafter.may_go.clear()
        while slow.health().num_timeouts == number:  # the last late answer may still be on its way
            began = time.monotonic()
            assert slow.propose("a") == [[]]
        drafter.may_go.set()
        slow.until_up()
        rests_s.append(time.monotonic() - began)
    assert rests_s[0] >= HELLO_DOWN_S
    assert rests_s[1] >= 2 * HELLO_DOWN_S
    assert rests_s[2] >= 4 * HELLO_DOWN_S


def test_a_late_drafter_is_logged_once_and_shown_until_it_answers(
    stack: ExitStack, place: Place, drafter: FakeDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    serve(stack, place, drafter)
    slow = replica(stack, place)
    slow.until_up()
    monitor = slow.source._monitor
    reason = "no answer within timeout_s (0.001 s)"
    for _ in range(MAX_LOGGED_TRIPS + 1):
        monitor.trip(reason)
    eventually(lambda: slow.health().reason == reason, "the reason", WAIT_S, 0.01)
    (record,) = caplog.records
    assert record.getMessage() == f"No drafts from the draft_model drafter: {reason}"
    monitor.reset()
    slow.grow("a", 20)
    slow.until_drafts("a")
    eventually(lambda: slow.health().up, "up", WAIT_S, 0.01)
    assert slow.health().reason == ""


def test_a_drafter_whose_model_fails_is_asked_with_back_off(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    serve(stack, place, drafter)
    made = replica(stack, place)
    drafter.error = MemoryError()
    made.until_up()
    made.grow("a", 20)
    trips, rests_s = [], []
    for _ in range(4):
        began = time.monotonic()
        assert made.propose("a") == [[]]
        trips.append(made.source._monitor._num_trips)
        made.until_up()
        rests_s.append(time.monotonic() - began)
    assert trips == [0, 1, 2, 3]  # other texts may have caused the first failure
    assert rests_s[2] >= 2 * HELLO_DOWN_S
    assert rests_s[3] >= 4 * HELLO_DOWN_S
    drafter.error = None
    made.until_drafts("a")


def test_a_drafter_that_moved_is_found_and_gets_the_texts_again(
    stack: ExitStack, place: Place
) -> None:
    first, second = FakeDrafter(), FakeDrafter()
    server = DrafterServer(first)
    place.address = server.address
    made = replica(stack, place, timeout_s=0.2)
    made.until_up()
    made.grow("a", 20)
    made.until_drafts("a")
    server.close()
    made.grow("a", 22)
    assert made.propose("a") == [[]]
    made.source._position_s = 1.0
    serve(stack, place, second)
    made.until_drafts("a")
    assert second.calls[0][0].start == 0
    made.grow("long", 2 * NEAR_TOKENS)
    assert made.reading_s("long") == [0.0]  # not measured for the new drafter


def test_no_step_waits_for_a_drafter_that_has_not_started(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    made = replica(stack, place)
    made.grow("a", 20)
    assert made.propose("a") == [[]]
    eventually(lambda: not made.health().up, "down", WAIT_S, 0.01)
    serve(stack, place, drafter)
    made.until_drafts("a")
    assert made.health().num_timeouts == 0


def test_a_source_that_is_switched_off_stays_down_while_its_drafter_is_up(
    served: Replica,
) -> None:
    monitor = served.source._monitor
    eventually(lambda: served.health().up, "up", WAIT_S, 0.01)
    served.metrics.set_up("draft_model", False)
    seen = monitor._number
    eventually(lambda: monitor._number > seen + 1, "further hellos", WAIT_S, 0.01)
    assert not served.health().up


def test_a_drafter_that_does_not_fit_is_refused_with_one_log_line(
    stack: ExitStack, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = FakeDrafter(HIDDEN_SIZE)
    serve(stack, place, wrong)
    with caplog.at_level(logging.WARNING):
        made = replica(stack, place)
        eventually(lambda: caplog.records, "a warning", WAIT_S, 0.01)
    made.grow("a", 20)
    assert made.propose("a") == [[]]
    (record,) = caplog.records
    assert "kind 'mtp' instead of 'draft_model'" in record.getMessage()
    assert "/models/fake" in record.getMessage()
    assert wrong.calls == []


class FakeServer:
    """Answers hellos as a drafter does, and requests with given frames."""

    def __init__(self, answers: Callable[[DraftRequest], Sequence[bytes]]) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # as in DrafterServer
        self._socket.bind("tcp://127.0.0.1:0")
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._answers = answers
        self.num_requests = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self._socket.poll(20):
                continue
            client, *frames = self._socket.recv_multipart()
            try:
                question = decode_question(frames)
            except WireError:
                continue
            if isinstance(question, Hello):
                greeting = Greeting(question.number, "x", FakeDrafter().card)
                self._socket.send_multipart([client, *encode(greeting)])
            else:
                self.num_requests += 1
                for answer in self._answers(question):
                    self._socket.send_multipart([client, answer])


def test_undecodable_answers_are_counted_and_give_no_draft(stack: ExitStack, place: Place) -> None:
    server = stack.enter_context(
        closing(FakeServer(lambda _: [b"nonsense", b"", b"\x91\xa6drafts"]))
    )
    place.address = server.address
    made = replica(stack, place, timeout_s=2.0)
    made.until_up()
    made.grow("a", 20)
    assert made.propose("a") == [[]]
    assert (made.health().num_errors, made.health().num_timeouts) == (3, 1)


DRAFT = RowAnswer(20, (1, 2, 3), b"\xff\xff\xff")


@pytest.mark.parametrize(
    ("rows", "sent", "num_errors"),
    [
        ((DRAFT,), (1, 2, 3), 0),
        ((), (), 1),
        ((DRAFT, DRAFT), (), 1),
        ((RowAnswer(20, tuple(range(100)), bytes(100)),), (0, 1, 2), 0),
        ((RowAnswer(20, (1, 2, 3), b"\xff"),), (), 1),
        ((RowAnswer(LAST, (1, 2, 3), b"\xff\xff\xff", LAST),), (1, 2, 3), 0),
        ((RowAnswer(0, (), b"", LAST),), (), 0),
    ],
)
def test_answers_that_do_not_fit_their_request_cost_only_drafts(
    rows: tuple[RowAnswer, ...],
    sent: tuple[int, ...],
    num_errors: int,
    stack: ExitStack,
    place: Place,
) -> None:
    def answers(request: DraftRequest) -> Sequence[bytes]:
        others = DraftAnswer(request.number + 1, (DRAFT,), 0.0)
        replies = [others, DraftAnswer(request.number, rows, 0.0)]
        return [bytes(frame) for reply in replies for frame in encode(reply)]

    server = stack.enter_context(closing(FakeServer(answers)))
    place.address = server.address
    made = replica(stack, place)
    made.until_up()
    member = Member("draft_model", made.source, ("draft_model",), 8)
    offers = Drafts.empty(16, 8)
    guarded = GuardedSource(member, made.metrics, time.monotonic, offers)
    for number, length in enumerate((20, 21, 25), start=1):
        made.grow(f"text {number}", length)
        made.until_up()
        batch = made.batch(f"text {number}")
        assert guarded.propose(batch, np.array([3], np.int32))
        (slot,) = batch.slots.tolist()
        assert offers.tokens[slot, : offers.lengths[slot]].tolist() == list(sent)
        assert made.health().num_errors == number * num_errors
        assert made.health().num_timeouts == 0


def test_a_flood_of_answers_does_not_hold_up_a_step(
    stack: ExitStack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(frames: Sequence[Frame]) -> Reply:
        time.sleep(0.05)
        return decode_reply(frames)

    other = b"".join(bytes(frame) for frame in encode(DraftAnswer(10**6, (), 0.0)))
    server = stack.enter_context(closing(FakeServer(lambda _: [other] * 1000)))
    place.address = server.address
    made = replica(stack, place, timeout_s=0.1)
    monkeypatch.setattr(drafter_link, "decode_reply", slowly)
    monkeypatch.setattr(remote, "LOST_S", 1000.0)  # the text is sent once
    made.grow("a", 20)
    for _ in range(2):  # the second step finds the rest of the flood
        made.until_up()
        began = time.monotonic()
        assert made.propose("a") == [[]]
        assert time.monotonic() - began < 10.0  # the whole flood would take 50 s
    assert made.health().num_timeouts == 1


def test_a_text_with_tokens_outside_the_vocabulary_is_sent_once(
    stack: ExitStack, place: Place, drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BACKOFF_S", 0.0)
    server = serve(stack, place, drafter)
    made = replica(stack, place)
    made.until_up()
    made.texts["wrong"] = np.append(TEXT[:20], np.int32(VOCAB_SIZE))
    made.grow("right", 20)
    for _ in range(3):
        assert [bool(draft) for draft in made.propose("wrong", "right")] == [False, True]
    assert (server.counters.num_refused["unfit"], server.counters.num_rows) == (1, 4)
    assert math.isnan(made.reading_s("wrong")[0])


def test_a_text_whose_answer_was_lost_is_sent_again(
    stack: ExitStack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FEED_BUDGET_S", 0.05)
    monkeypatch.setattr(remote, "LOST_S", 0.05)
    server = stack.enter_context(closing(FakeServer(lambda _: [])))
    place.address = server.address
    made = replica(stack, place)
    made.until_up()
    made.grow("long", 2 * NEAR_TOKENS)

    def is_sent_again() -> bool:
        made.propose("long")
        return server.num_requests > 1

    eventually(is_sent_again, "the text again", WAIT_S, 0.005)
    assert made.health().num_timeouts == 0


def test_the_end_of_a_text_with_a_late_answer_is_sent(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    serve(stack, place, drafter)
    made = replica(stack, place, timeout_s=1.0)
    made.until_up()
    drafter.may_go.clear()
    made.grow("late", 20)
    assert made.propose("late") == [[]]
    assert made.health().num_timeouts == 1
    made.close("late")
    drafter.may_go.set()
    eventually(lambda: drafter.forgotten, "the end of the late text", WAIT_S, 0.005)
    (row,) = drafter.calls[0]
    assert drafter.forgotten == [row.key]
