from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq

from specserve.core.errors import WireError
from specserve.core.metrics import HealthSnapshot, SpeculationMetrics
from specserve.core.source_config import DraftModelConfig, MtpConfig
from specserve.core.types import DraftBatch, HiddenStates, Int32Array, RequestControls
from specserve.drafters.base import Row
from specserve.drafters.server import DrafterServer
from specserve.proposers import remote
from specserve.proposers.base import Surroundings
from specserve.proposers.drafter_lookout import DOUBTS_TOLD
from specserve.proposers.remote import (
    FEED_TOKENS,
    NEAR_TOKENS,
    REST_S,
    RemoteProposer,
)
from specserve.wire.frames import decode_question, encode
from specserve.wire.messages import PROTOCOL, Card, Hello
from tests.drafters.fakes import VOCAB_SIZE, WAIT_S, FakeDrafter, draft_of, states_of
from tests.integration.cluster import eventually

HIDDEN_SIZE = 2
TEXT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 20_000).astype(np.int32)


class Replica:
    """A source with its requests' texts; what is drafted has to follow from them."""

    def __init__(self, find: Callable[[], str | None], kind: str = "draft_model", **options: Any):
        self.metrics = SpeculationMetrics((kind,))
        self.texts: dict[str, Int32Array] = {}
        surroundings = Surroundings(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            metrics=self.metrics,
            find_drafter=lambda config: find,
        )
        options = {"max_draft_len": 3, "timeout_s": WAIT_S, "dynamic": False, **options}
        config: DraftModelConfig | MtpConfig
        if kind == "mtp":
            config = MtpConfig(kind="mtp", **options)
        else:
            config = DraftModelConfig(kind="draft_model", model="m", **options)
        self.proposer = RemoteProposer.build(config, surroundings)
        self.kind = kind

    def propose(
        self,
        *names: str,
        limit: int = 3,
        controls: tuple[RequestControls, ...] = (),
        hidden: HiddenStates | None = None,
    ) -> list[tuple[int, ...]]:
        texts = [self.texts[name] for name in names]
        lengths = np.array([len(text) for text in texts], np.int32)
        rows = np.zeros((len(texts), lengths.max() + 8), np.int32)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = text
        batch = DraftBatch(
            list(names),
            rows,
            lengths,
            lengths,
            np.full(len(names), limit, np.int32),
            controls,
            hidden,
        )
        drafts = self.proposer.propose(batch)
        self.chances = [draft.chances for draft in drafts]
        for text, draft in zip(texts, drafts, strict=True):
            assert draft.source == self.kind
            assert len(draft.tokens) <= limit
            assert draft.tokens == draft_of(text.tolist(), 3)[: len(draft.tokens)]
        return [draft.tokens for draft in drafts]

    def grow(self, name: str, end: int) -> None:
        self.texts[name] = TEXT[:end]

    def health(self) -> HealthSnapshot:
        (health,) = self.metrics.snapshot().health
        return health

    def until_up(self) -> None:
        eventually(lambda: self.proposer._link._lookout.peer, "a drafter", WAIT_S, 0.005)

    def until_drafts(self, *names: str) -> None:
        eventually(lambda: all(self.propose(*names)), "drafts", WAIT_S, 0.005)


class Place:
    """Where the drafter is, for replicas to find it."""

    def __init__(self) -> None:
        self.address: str | None = None

    def __call__(self) -> str | None:
        return self.address


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def drafter() -> FakeDrafter:
    return FakeDrafter()


def serve(stack: ExitStack, place: Place, drafter: FakeDrafter) -> DrafterServer:
    server = stack.enter_context(closing(DrafterServer(drafter)))
    stack.callback(drafter.may_go.set)
    place.address = server.address
    return server


def replica(stack: ExitStack, place: Place, kind: str = "draft_model", **options: Any) -> Replica:
    made = Replica(place, kind, **options)
    stack.enter_context(closing(made.proposer))
    return made


@pytest.fixture
def served(stack: ExitStack, place: Place, drafter: FakeDrafter) -> Replica:
    """A replica whose drafter is there."""
    serve(stack, place, drafter)
    made = replica(stack, place)
    made.until_up()
    return made


def test_texts_that_grow_are_drafted_for_step_by_step(served: Replica) -> None:
    random = np.random.default_rng(1)
    ends = {"a": 5, "b": 60, "c": 30}
    for _ in range(30):
        for name in ends:
            served.grow(name, ends[name])
        assert all(len(draft) == 3 for draft in served.propose(*ends))
        ends = {name: end + int(random.integers(1, 5)) for name, end in ends.items()}


def test_only_what_is_new_is_sent(served: Replica, drafter: FakeDrafter) -> None:
    for end in (40, 41, 44):
        served.grow("a", end)
        served.propose("a")
    assert [(row.start, len(row.tokens)) for (row,) in drafter.calls] == [(0, 40), (40, 1), (41, 3)]


def test_what_other_sources_guess_is_continued(served: Replica, drafter: FakeDrafter) -> None:
    for name in ("a", "b", "long"):
        served.grow(name, 40 if name != "long" else 2 * NEAR_TOKENS)
    names, guess = ["a", "b", "long"], tuple(TEXT[100:105].tolist())
    rows = np.stack([np.resize(served.texts[name], 2 * NEAR_TOKENS) for name in names])
    lengths = np.array([40, 40, 2 * NEAR_TOKENS], np.int32)
    limits = np.array([2, 3, 3], np.int32)
    batch = DraftBatch(names, rows, lengths, lengths, limits, guessed=(guess, (), guess))
    drafts = [draft.tokens for draft in served.proposer.propose(batch)]
    text = served.texts["a"].tolist()
    assert drafts == [draft_of([*text, *guess], 2), draft_of(text, 3), ()]

    def read() -> list[Row]:
        return [row for call in drafter.calls for row in call if row.key[1] == 2]

    eventually(read, "the long text", WAIT_S, 0.005)
    assert not any(len(row.guessed) for row in read())


def test_a_text_that_the_drafter_has_no_room_for_is_sent_seldom(
    served: Replica, drafter: FakeDrafter
) -> None:
    drafter.room = 1
    for name in ("a", "b"):
        served.grow(name, 200)
    served.until_drafts("a")
    began = time.monotonic()
    for _ in range(50):
        first, second = served.propose("a", "b")
        assert first
        assert not second
    sent = [row.key[1] for call in drafter.calls for row in call]
    assert 1 <= sent.count(1) <= 1 + (time.monotonic() - began) / REST_S
    served.proposer.forget(["a"])
    served.until_drafts("b")


@pytest.mark.parametrize("kind", ["draft_model", "mtp"])
def test_a_text_that_the_drafter_fails_to_read_is_sent_seldom_and_whole(
    stack: ExitStack, place: Place, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(remote, "REST_S", 1000.0)
    drafter = FakeDrafter(HIDDEN_SIZE if kind == "mtp" else 0)
    serve(stack, place, drafter)
    made = replica(stack, place, kind)
    made.until_up()
    made.grow("long", 2 * NEAR_TOKENS)
    states = states_of(TEXT[: 2 * NEAR_TOKENS], HIDDEN_SIZE)
    hidden = HiddenStates(lambda: states, (len(states),), (0,)) if kind == "mtp" else None
    drafter.error = MemoryError()
    assert made.propose("long", hidden=hidden) == [()]

    def has_heard() -> bool:
        assert made.propose("long") == [()]
        return made.health().num_errors == 1

    eventually(has_heard, "the error", WAIT_S, 0.005)
    for _ in range(5):
        assert made.propose("long") == [()]
    assert len(drafter.calls) == 1
    drafter.error = None
    made.proposer._texts["long"].rests_until = 0.0
    made.until_drafts("long")
    assert not drafter.begins


def test_another_drafter_may_have_room_at_once(
    stack: ExitStack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "REST_S", 1000.0)
    full, roomy = FakeDrafter(), FakeDrafter()
    full.room = 1
    server = DrafterServer(full)
    place.address = server.address
    made = replica(stack, place)
    made.until_up()
    for name in ("a", "b"):
        made.grow(name, 20)
    made.until_drafts("a")
    assert made.propose("b") == [()]
    reading_s = made.proposer.reading_s(batch_of(made, "a", "b"))
    assert reading_s[0] == 0.0
    assert math.isnan(reading_s[1])
    num_calls = len(full.calls)
    assert made.propose("b") == [()]
    assert len(full.calls) == num_calls
    server.close()
    serve(stack, place, roomy)
    made.until_drafts("b")


def test_no_more_is_asked_for_than_can_be_used(served: Replica, drafter: FakeDrafter) -> None:
    served.grow("a", 10)
    assert [len(draft) for draft in served.propose("a", limit=1)] == [1]
    assert [len(draft) for draft in served.propose("a", limit=9)] == [3]
    assert [call[0].max_draft_tokens for call in drafter.calls] == [1, 3]


def test_nobody_waits_for_a_long_prompt_and_it_is_drafted_for_when_it_is_known(
    served: Replica, drafter: FakeDrafter
) -> None:
    served.grow("long", 2 * FEED_TOKENS + 100)
    served.grow("short", 10)
    drafter.may_go.clear()
    assert served.propose("long") == [()]
    assert drafter.entered.wait(WAIT_S)
    assert served.propose("long", limit=0) == [()]
    drafter.may_go.set()
    assert served.propose("short") != [()]
    served.until_drafts("long")
    assert served.health().num_timeouts == 0
    sent = [row.start for call in drafter.calls for row in call if row.key[1] == 0]
    assert sent == sorted(set(sent))  # nothing was sent twice


def test_long_texts_of_one_step_are_answered_each_for_itself(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    server = serve(stack, place, drafter)
    made = replica(stack, place)
    made.until_up()
    made.grow("longest", FEED_TOKENS)
    made.grow("shorter", 2 * NEAR_TOKENS)
    made.propose("longest", "shorter")
    eventually(lambda: server.counters.num_requests == 2, "two requests", WAIT_S, 0.001)
    made.until_drafts("shorter")
    made.until_drafts("longest")


def test_a_text_that_falls_behind_is_brought_up_to_date_though_no_draft_is_wanted(
    served: Replica, drafter: FakeDrafter
) -> None:
    served.grow("a", NEAR_TOKENS)
    served.propose("a", limit=0)
    served.grow("b", 5)
    served.propose("b")
    assert [row.key[1] for call in drafter.calls for row in call] == [1]
    served.grow("a", NEAR_TOKENS + 1)
    served.propose("a", limit=0)
    eventually(lambda: len(drafter.calls) == 2, "the text", WAIT_S, 0.001)


def test_what_the_drafter_has_forgotten_is_sent_again(
    served: Replica, drafter: FakeDrafter
) -> None:
    served.grow("a", 20)
    served.propose("a")
    drafter.lose()
    served.grow("a", 22)
    assert served.propose("a") == [()]
    served.grow("a", 23)
    assert served.propose("a") != [()]


def test_an_error_of_the_drafter_costs_one_draft(served: Replica, drafter: FakeDrafter) -> None:
    served.grow("a", 20)
    drafter.error = MemoryError()
    assert served.propose("a") == [()]
    drafter.error = None
    assert served.propose("a") != [()]
    assert (served.health().num_errors, served.health().num_timeouts) == (1, 0)


def test_a_drafter_that_stops_is_waited_for_once_and_used_again_when_it_goes_on(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    serve(stack, place, drafter)
    stopped = replica(stack, place, timeout_s=0.1)
    stopped.until_up()
    stopped.grow("a", 20)
    stopped.until_drafts("a")
    timeouts = stopped.health().num_timeouts
    drafter.may_go.clear()
    began = time.monotonic()
    for end in range(21, 40):
        stopped.grow("a", end)
        assert stopped.propose("a") == [()]
    assert time.monotonic() - began < 5 * 0.1
    assert stopped.health().num_timeouts == timeouts + 1
    eventually(lambda: not stopped.health().up, "down", WAIT_S, 0.01)
    drafter.may_go.set()
    stopped.until_drafts("a")
    eventually(lambda: stopped.health().up, "up", WAIT_S, 0.01)
    assert drafter.calls[-1][0].start >= 20  # its late answer told what it holds


def test_a_late_answer_does_not_have_long_texts_sent_twice(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    serve(stack, place, drafter)
    made = replica(stack, place, timeout_s=0.1)
    made.until_up()
    made.grow("long", 2 * FEED_TOKENS)
    made.grow("short", 20)
    drafter.may_go.clear()
    made.propose("long")
    assert drafter.entered.wait(WAIT_S)
    assert made.propose("short") == [()]
    assert made.health().num_timeouts == 1
    drafter.may_go.set()
    made.until_drafts("long", "short")
    starts = [row.start for call in drafter.calls for row in call if row.key[1] == 0]
    assert starts == sorted(set(starts))


def test_a_drafter_that_is_always_late_is_asked_less_and_less(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    serve(stack, place, drafter)
    slow = replica(stack, place, timeout_s=0.001)
    lookout = slow.proposer._link._lookout
    rests = []
    for _ in range(3):
        slow.until_up()
        drafter.may_go.clear()
        slow.grow("a", 20)
        assert slow.propose("a") == [()]
        rests.append(lookout._rest_until - time.monotonic())
        drafter.may_go.set()
    assert rests[0] <= 0.0 < rests[1] < rests[2]


def test_a_drafter_that_stays_late_is_told_of_once_and_until_it_answers(
    stack: ExitStack, place: Place, drafter: FakeDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    serve(stack, place, drafter)
    slow = replica(stack, place)
    slow.until_up()
    lookout = slow.proposer._link._lookout
    for _ in range(DOUBTS_TOLD + 1):
        lookout.doubt("no answer within timeout_s (0.001 s)")
    told = "no answer within timeout_s (0.001 s)"
    eventually(lambda: slow.health().reason == told, "the reason", WAIT_S, 0.01)
    (record,) = caplog.records
    assert record.getMessage() == f"No drafts from the draft_model drafter: {told}"
    lookout._rest_until = 0.0
    slow.grow("a", 20)
    slow.until_drafts("a")
    eventually(lambda: slow.health().up, "up", WAIT_S, 0.01)
    assert slow.health().reason == ""


def test_a_drafter_whose_model_fails_is_asked_less_and_less(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    serve(stack, place, drafter)
    made = replica(stack, place)
    lookout = made.proposer._link._lookout
    drafter.error = MemoryError()
    rests = []
    for _ in range(4):
        made.until_up()
        made.grow("a", 20)
        assert made.propose("a") == [()]
        rests.append(lookout._rest_until - time.monotonic())
    assert rests[1] <= 0.0 < rests[2] < rests[3]  # the first one may have been the other texts'
    drafter.error = None
    made.until_drafts("a")


def test_a_drafter_that_was_restarted_elsewhere_is_found_and_gets_the_texts_again(
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
    assert made.propose("a") == [()]
    serve(stack, place, second)
    made.until_drafts("a")
    assert second.calls[0][0].start == 0


def test_a_drafter_that_is_not_there_yet_is_waited_for_by_nobody(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    made = replica(stack, place)
    made.grow("a", 20)
    assert made.propose("a") == [()]
    eventually(lambda: not made.health().up, "down", WAIT_S, 0.01)
    serve(stack, place, drafter)
    made.until_drafts("a")
    assert made.health().num_timeouts == 0


def test_a_source_that_is_switched_off_is_not_shown_as_up_because_its_drafter_is_there(
    served: Replica,
) -> None:
    lookout = served.proposer._link._lookout
    eventually(lambda: served.health().up, "up", WAIT_S, 0.01)
    served.metrics.set_up("draft_model", False)
    seen = lookout._number
    eventually(lambda: lookout._number > seen + 1, "further hellos", WAIT_S, 0.01)
    assert not served.health().up


def test_a_drafter_that_does_not_fit_is_refused_with_one_line(
    stack: ExitStack, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = FakeDrafter(HIDDEN_SIZE)
    serve(stack, place, wrong)
    with caplog.at_level(logging.WARNING):
        made = replica(stack, place)
        eventually(lambda: caplog.records, "a warning", WAIT_S, 0.01)
    made.grow("a", 20)
    assert made.propose("a") == [()]
    (record,) = caplog.records
    assert "kind 'mtp' instead of 'draft_model'" in record.getMessage()
    assert "/models/fake" in record.getMessage()
    assert wrong.calls == []


class Babbler:
    """Introduces itself as a drafter, and answers requests with whatever it was given."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
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
                card = Card(
                    question.number, PROTOCOL, "x", "draft_model", "m", VOCAB_SIZE, "", 0, 1000
                )
                self._socket.send_multipart([client, *encode(card)])
            else:
                self.num_requests += 1
                for answer in self._answers:
                    self._socket.send_multipart([client, answer])


def test_answers_that_are_none_are_counted_and_change_nothing(
    stack: ExitStack, place: Place
) -> None:
    babbler = stack.enter_context(closing(Babbler([b"nonsense", b"", b"\x91\xa6drafts"])))
    place.address = babbler.address
    made = replica(stack, place, timeout_s=0.2)
    made.until_up()
    made.grow("a", 20)
    assert made.propose("a") == [()]
    assert (made.health().num_errors, made.health().num_timeouts) == (3, 1)


def test_a_text_whose_answer_was_lost_is_sent_again(
    stack: ExitStack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FEED_BUDGET_S", 0.05)
    monkeypatch.setattr(remote, "LOST_S", 0.05)
    babbler = stack.enter_context(closing(Babbler([])))
    place.address = babbler.address
    made = replica(stack, place)
    made.until_up()
    made.grow("long", 2 * NEAR_TOKENS)

    def is_sent_again() -> bool:
        made.propose("long")
        return babbler.num_requests > 1

    eventually(is_sent_again, "the text again", WAIT_S, 0.005)
    assert made.health().num_timeouts == 0


def test_texts_that_are_too_long_for_the_drafter_are_not_sent(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    drafter.card = replace(drafter.card, max_tokens=20)
    serve(stack, place, drafter)
    made = replica(stack, place)
    made.until_up()
    made.grow("a", 20)
    assert made.propose("a") != [()]
    made.grow("a", 21)
    assert made.propose("a") == [()]
    assert len(drafter.calls) == 1


def test_several_replicas_share_a_drafter(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    serve(stack, place, drafter)
    replicas = [replica(stack, place) for _ in range(2)]
    for number, each in enumerate(replicas):
        each.until_up()
        each.texts["a"] = TEXT[number : number + 30]
    for _ in range(3):
        assert all(each.propose("a") != [()] for each in replicas)
    assert len({row.key for call in drafter.calls for row in call}) == 2


def test_ended_requests_are_forgotten_and_their_ids_may_come_again(
    served: Replica, drafter: FakeDrafter
) -> None:
    served.grow("a", 20)
    served.propose("a")
    served.proposer.forget(["a", "unknown"])
    served.texts["a"] = TEXT[100:130]
    assert served.propose("a") != [()]
    assert [key[1] for key in drafter.forgotten] == [0]
    assert [row.key[1] for call in drafter.calls for row in call] == [0, 1]


def test_a_drafter_is_not_bothered_with_the_end_of_texts_that_it_was_not_told_of(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    server = serve(stack, place, drafter)
    made = replica(stack, place, dynamic=True)
    made.until_up()
    for name in ("untold", "told"):
        made.grow(name, 20)
        made.propose(name, limit=0 if name == "untold" else 3)
        made.proposer.forget([name])
    eventually(lambda: drafter.forgotten, "the end of the text that was told", WAIT_S, 0.005)
    assert [key[1] for key in drafter.forgotten] == [1]
    assert server.counters.num_requests == 2


def test_a_text_whose_answer_was_late_is_forgotten_when_it_ends(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    serve(stack, place, drafter)
    made = replica(stack, place, timeout_s=0.05)
    made.until_up()
    drafter.may_go.clear()
    made.grow("late", 20)
    assert made.propose("late") == [()]
    assert made.health().num_timeouts == 1
    made.proposer.forget(["late"])
    drafter.may_go.set()
    eventually(lambda: drafter.forgotten, "the end of the late text", WAIT_S, 0.005)
    (row,) = drafter.calls[0]
    assert drafter.forgotten == [row.key]


def test_requests_that_want_no_drafts_of_this_source_do_not_reach_it(
    served: Replica, drafter: FakeDrafter
) -> None:
    names = ("a", "b", "c", "d")
    for name in names:
        served.grow(name, 20)
    controls = (
        RequestControls(speculation="off"),
        RequestControls(speculation="ngram"),
        RequestControls(max_draft_tokens=0),
        RequestControls(speculation="draft_model"),
    )
    assert [bool(draft) for draft in served.propose(*names, controls=controls)] == [
        *(False, False, False, True)
    ]
    assert [len(call) for call in drafter.calls] == [1]


def test_only_texts_of_one_tenant_adapter_and_salt_may_share_a_beginning(
    served: Replica, drafter: FakeDrafter
) -> None:
    names = tuple("abcdefg")
    for name in names:
        served.grow(name, 20)
    secret = RequestControls(tenant="x", learn=False)
    served.propose(
        *names,
        controls=(
            RequestControls(tenant="x"),
            RequestControls(tenant="x"),
            RequestControls(tenant="y"),
            RequestControls(tenant="x", adapter="l"),
            RequestControls(tenant="x", cache_salt="s"),
            secret,
            secret,
        ),
    )
    salts = [row.salt for row in sorted(drafter.calls[0], key=lambda row: row.key[1])]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 6


def test_a_source_that_is_ended_leaves_no_thread(place: Place) -> None:
    before = threading.active_count()
    surroundings = Surroundings(find_drafter=lambda config: place)
    RemoteProposer.build(DraftModelConfig(kind="draft_model", model="m"), surroundings)
    assert threading.active_count() > before
    for end in surroundings.exits:
        end()
    assert threading.active_count() == before


class Target:
    """An engine that hands over the states of what it computes, refused draft tokens included."""

    def __init__(self, made: Replica) -> None:
        self._made = made
        self.computed: dict[str, int] = {}

    def step(self, scheduled: dict[str, int], sampled: dict[str, int]) -> list[tuple[int, ...]]:
        """Computes so many positions of each request, then takes so many new tokens of ``TEXT``."""
        values = []
        for name, size in scheduled.items():
            start = self.computed[name]
            states = states_of(TEXT[: start + size], HIDDEN_SIZE)[start:].copy()
            known = len(self._made.texts[name]) + max(sampled[name] - 1, 0)
            states[max(known - start, 0) :] = 7  # of refused tokens
            values.append(states)
        hidden = HiddenStates(
            lambda: np.concatenate(values),
            tuple(scheduled.values()),
            tuple(self.computed[name] for name in scheduled),
        )
        for name, size in scheduled.items():
            new = sampled[name]
            length = len(self._made.texts[name])
            self._made.grow(name, length + new)
            self.computed[name] = length + new - 1 if new else self.computed[name] + size
        limit = 3 if all(sampled.values()) else 0
        return self._made.propose(*scheduled, limit=limit, hidden=hidden)


def test_a_draft_tells_how_sure_its_drafter_is(served: Replica, drafter: FakeDrafter) -> None:
    drafter.chances = (1.0, 0.5, 0.0)
    served.texts["a"] = TEXT[:20]
    served.propose("a", limit=2)
    assert served.chances == [pytest.approx((1.0, 0.5), abs=1 / 255)]


@pytest.fixture
def mtp(stack: ExitStack, place: Place) -> tuple[Replica, Target, FakeDrafter]:
    drafter = FakeDrafter(HIDDEN_SIZE)
    serve(stack, place, drafter)
    made = replica(stack, place, "mtp")
    made.until_up()
    return made, Target(made), drafter


Mtp = tuple[Replica, Target, FakeDrafter]


def open_text(made: Replica, target: Target, name: str, length: int, cached: int = 0) -> None:
    made.grow(name, length)
    target.computed[name] = cached


def test_states_go_with_their_tokens_and_those_of_refused_drafts_do_not(mtp: Mtp) -> None:
    made, target, _ = mtp
    open_text(made, target, "a", 20)
    open_text(made, target, "b", 30)
    assert all(target.step({"a": 20, "b": 30}, {"a": 1, "b": 1}))
    for accepted in (0, 3, 1, 2, 0):
        drafts = target.step({"a": 4, "b": 4}, {"a": 1 + accepted, "b": 1})
        assert [len(draft) for draft in drafts] == [3, 3]


def test_a_long_prompt_is_brought_up_to_date_while_it_is_read(mtp: Mtp) -> None:
    made, target, drafter = mtp
    open_text(made, target, "a", 1000)
    assert target.step({"a": 512}, {"a": 0}) == [()]
    eventually(lambda: drafter.calls, "the first part", WAIT_S, 0.001)
    target.step({"a": 488}, {"a": 1})
    drafts: list[tuple[int, ...]] = [()]
    deadline = time.monotonic() + WAIT_S
    while drafts == [()]:
        assert time.monotonic() < deadline
        drafts = target.step({"a": 1}, {"a": 1})
    assert drafter.begins == {}


def test_a_step_that_reads_much_loses_no_state_of_the_texts_beside_it(
    mtp: Mtp, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, target, drafter = mtp
    assert made.proposer._states is not None
    monkeypatch.setattr(made.proposer._states, "_max_tokens", 400)
    open_text(made, target, "a", 20)
    assert target.step({"a": 20}, {"a": 1}) != [()]
    open_text(made, target, "long", 500)
    draft, _ = target.step({"a": 1, "long": 500}, {"a": 1, "long": 1})
    assert len(draft) == 3
    assert made.proposer._states.num_tokens <= 400
    draft, _ = target.step({"a": 1, "long": 1}, {"a": 1, "long": 1})
    assert len(draft) == 3
    assert drafter.begins == {}


@pytest.mark.parametrize("length", [NEAR_TOKENS - 1, 2 * NEAR_TOKENS])
def test_states_that_are_too_large_for_one_request_go_one_text_after_the_other(
    stack: ExitStack, place: Place, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    drafter = FakeDrafter(HIDDEN_SIZE)
    serve(stack, place, drafter)
    made = replica(stack, place, "mtp", timeout_s=0.1)
    made.until_up()
    target = Target(made)
    monkeypatch.setattr(remote, "MAX_STATE_BYTES", 3 * length * HIDDEN_SIZE)
    drafter.may_go.clear()
    for name in "ab":
        open_text(made, target, name, length)
    target.step({"a": length, "b": length}, {"a": 1, "b": 1})
    assert len(made.proposer._sent) == 1
    drafter.may_go.set()
    made.until_drafts("a")
    made.until_drafts("b")
    assert drafter.begins == {}
    assert made.health().num_partial_texts == 0


def test_a_prompt_whose_beginning_the_target_had_cached_begins_where_states_are(mtp: Mtp) -> None:
    made, target, drafter = mtp
    open_text(made, target, "a", 500, cached=480)
    assert target.step({"a": 20}, {"a": 1}) != [()]
    assert list(drafter.begins.values()) == [480]
    assert drafter.calls[0][0].start == 0
    assert target.step({"a": 2}, {"a": 1}) != [()]
    assert made.health().num_partial_texts == 1


def test_a_drafter_that_forgot_begins_at_the_first_state_that_is_left(mtp: Mtp) -> None:
    made, target, drafter = mtp
    open_text(made, target, "a", 20)
    assert target.step({"a": 20}, {"a": 1}) != [()]
    drafter.lose()
    assert target.step({"a": 4}, {"a": 3}) == [()]
    assert target.step({"a": 4}, {"a": 2}) != [()]
    assert list(drafter.begins.values()) == [20]


def test_a_request_that_was_preempted_goes_on(mtp: Mtp) -> None:
    made, target, _ = mtp
    open_text(made, target, "a", 20)
    assert target.step({"a": 20}, {"a": 1}) != [()]
    target.computed["a"] = 0
    assert target.step({"a": 21}, {"a": 1}) != [()]
    assert target.step({"a": 1}, {"a": 1}) != [()]


def test_a_source_that_is_seldom_asked_is_told_only_of_texts_that_a_draft_is_wanted_of() -> None:
    drafter = FakeDrafter()
    with closing(DrafterServer(drafter)) as server:
        replica = Replica(lambda: server.address)
        with closing(replica.proposer):
            replica.texts["asked"] = TEXT[:20]
            replica.until_drafts("asked")
            for _ in range(20):
                replica.propose("asked", limit=0)
            replica.texts["new"] = TEXT[: 5 * NEAR_TOKENS]
            num_calls = len(drafter.calls)
            for _ in range(5):
                replica.propose("asked", "new", limit=0)
            replica.until_drafts("asked")  # behind whatever had been sent before
            assert len(drafter.calls) == num_calls + 1
            replica.until_drafts("new")


def test_a_source_that_may_not_pay_is_told_of_no_text_before_a_draft_is_wanted(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    serve(stack, place, drafter)
    made = replica(stack, place, dynamic=True)
    made.until_up()
    made.grow("new", 5 * NEAR_TOKENS)
    for _ in range(5):
        made.propose("new", limit=0)
    made.grow("short", 5)
    assert made.propose("short") != [()]  # behind whatever had been sent before
    assert len(drafter.calls) == 1
    made.until_drafts("new")


def batch_of(made: Replica, *names: str) -> DraftBatch:
    lengths = np.array([len(made.texts[name]) for name in names], np.int32)
    return DraftBatch(list(names), np.zeros((len(names), 1), np.int32), lengths, lengths, lengths)


def test_what_reading_a_text_takes_is_told_once_it_was_measured(
    stack: ExitStack, place: Place, drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(stack, place, drafter)
    made = replica(stack, place, dynamic=True)
    made.until_up()
    for name in ("first", "second", "longer"):
        made.grow(name, 5 * NEAR_TOKENS)
    made.grow("longer", 10 * NEAR_TOKENS)
    made.grow("short", NEAR_TOKENS)
    assert made.proposer.reading_s(batch_of(made, "first", "short")) == [0.0, 0.0]
    drafter.may_go.clear()
    made.propose("first")
    assert drafter.entered.wait(WAIT_S)
    time.sleep(0.05)
    drafter.may_go.set()
    made.until_drafts("first")
    names = ("first", "second", "longer", "short")
    first, second, longer, short = made.proposer.reading_s(batch_of(made, *names))
    assert (first, short) == (0.0, 0.0)
    assert second > 0.04
    assert longer == pytest.approx(2 * second)
    monkeypatch.setattr(made.proposer, "_has_own_gpu", True)
    assert made.proposer.reading_s(batch_of(made, *names)) == [0.0] * 4
    drafter.may_go.clear()
    made.propose("second")
    assert made.proposer.reading_s(batch_of(made, "second")) == [math.inf]  # is being read


@pytest.mark.parametrize("is_full", [False, True])
def test_texts_that_no_draft_is_wanted_of_wait_unless_their_states_would_be_lost(
    is_full: bool, stack: ExitStack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = FakeDrafter(HIDDEN_SIZE)
    serve(stack, place, drafter)
    made = replica(stack, place, "mtp", dynamic=True)
    made.until_up()
    target = Target(made)
    open_text(made, target, "asked", 20)
    target.step({"asked": 20}, {"asked": 1})
    for _ in range(10):  # it is in use
        target.step({"asked": 1}, {"asked": 1})
    if is_full:
        monkeypatch.setattr("specserve.proposers.remote.PENDING_STATES", 5 * NEAR_TOKENS)
    open_text(made, target, "new", 5 * NEAR_TOKENS)
    target.step({"new": 4 * NEAR_TOKENS}, {"new": 0})

    def read(text: int) -> int:
        return sum(row.key[1] == text for call in drafter.calls for row in call)

    before = read(0)
    target.step({"asked": 1}, {"asked": 1})
    eventually(lambda: read(0) > before, "the last step's text to be read", WAIT_S, 0.005)
    if is_full:
        eventually(lambda: read(1), "the new text to be read", WAIT_S, 0.005)
    else:
        assert not read(1)
