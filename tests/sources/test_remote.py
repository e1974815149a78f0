"""The requests of a replica to its drafter."""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

from specserve.core.source_config import DraftModelConfig
from specserve.core.types import RequestControls
from specserve.drafters.server import DrafterServer
from specserve.sources import remote
from specserve.sources.base import SourceContext
from specserve.sources.remote import BACKOFF_S, FEED_TOKENS, NEAR_TOKENS, DrafterClient
from tests.drafters.fakes import WAIT_S, FakeDrafter
from tests.integration.cluster import eventually
from tests.sources.remote_replica import TEXT, Place, Replica, replica, serve


def test_growing_texts_get_drafts_in_each_step(served: Replica) -> None:
    random = np.random.default_rng(1)
    ends = {"a": 5, "b": 60, "c": 30}
    for _ in range(30):
        for name in ends:
            served.grow(name, ends[name])
        assert all(len(draft) == 3 for draft in served.propose(*ends))
        ends = {name: end + int(random.integers(1, 5)) for name, end in ends.items()}


def test_only_new_tokens_are_sent(served: Replica, drafter: FakeDrafter) -> None:
    for end in (40, 41, 44):
        served.grow("a", end)
        served.propose("a")
    assert [(row.start, len(row.tokens)) for (row,) in drafter.calls] == [(0, 40), (40, 1), (41, 3)]


def test_a_text_that_the_drafter_has_no_room_for_is_sent_rarely(
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
    assert 1 <= sent.count(1) <= 1 + (time.monotonic() - began) / BACKOFF_S
    served.close("a")
    served.until_drafts("b")


def test_a_text_without_room_is_sent_to_a_new_drafter_at_once(
    stack: ExitStack, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BACKOFF_S", 1000.0)
    full, roomy = FakeDrafter(), FakeDrafter()
    full.room = 1
    server = DrafterServer(full)
    place.address = server.address
    made = replica(stack, place)
    made.until_up()
    for name in ("a", "b"):
        made.grow(name, 20)
    made.until_drafts("a")
    assert made.propose("b") == [[]]
    reading_s = made.reading_s("a", "b")
    assert reading_s[0] == 0.0
    assert math.isnan(reading_s[1])
    num_calls = len(full.calls)
    assert made.propose("b") == [[]]
    assert len(full.calls) == num_calls
    server.close()
    serve(stack, place, roomy)
    made.until_drafts("b")


def test_no_more_tokens_are_requested_than_the_limits(
    served: Replica, drafter: FakeDrafter
) -> None:
    served.grow("a", 10)
    assert [len(draft) for draft in served.propose("a", limit=1)] == [1]
    assert [len(draft) for draft in served.propose("a", limit=3)] == [3]
    assert [call[0].max_draft_tokens for call in drafter.calls] == [1, 3]


def test_no_step_waits_for_a_long_prompt_and_it_gets_drafts_later(
    served: Replica, drafter: FakeDrafter
) -> None:
    served.grow("long", 2 * FEED_TOKENS + 100)
    served.grow("short", 10)
    drafter.may_go.clear()
    assert served.propose("long") == [[]]
    assert drafter.entered.wait(WAIT_S)
    assert served.propose("long", limit=0) == [[]]
    drafter.may_go.set()
    assert served.propose("short") != [[]]
    served.until_drafts("long")
    assert served.health().num_timeouts == 0
    sent = [row.start for call in drafter.calls for row in call if row.key[1] == 0]
    assert sent == sorted(set(sent))  # nothing was sent twice


def test_long_texts_of_one_step_go_in_requests_of_their_own(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    server = serve(stack, place, drafter)
    made = replica(stack, place)
    made.until_up()
    made.grow("longest", FEED_TOKENS)
    made.grow("shorter", 2 * NEAR_TOKENS)
    made.propose("longest", "shorter")
    eventually(lambda: server.counters.num_rows == 2, "two rows", WAIT_S, 0.001)
    made.until_drafts("shorter")
    made.until_drafts("longest")


def test_a_text_that_lags_is_sent_even_if_no_draft_is_wanted(
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


def test_a_text_that_the_drafter_lost_is_sent_again(served: Replica, drafter: FakeDrafter) -> None:
    served.grow("a", 20)
    served.propose("a")
    drafter.lose()
    served.grow("a", 22)
    assert served.propose("a") == [[]]
    served.grow("a", 23)
    assert served.propose("a") != [[]]


def test_a_text_too_long_for_the_drafter_is_not_sent(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    drafter.card = msgspec.structs.replace(drafter.card, max_tokens=20)
    serve(stack, place, drafter)
    made = replica(stack, place)
    made.until_up()
    made.grow("a", 20)
    assert made.propose("a") != [[]]
    made.grow("a", 21)
    assert made.propose("a") == [[]]
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
        assert all(each.propose("a") != [[]] for each in replicas)
    assert len({row.key for call in drafter.calls for row in call}) == 2


def test_ended_requests_are_forgotten_and_their_slots_reused(
    served: Replica, drafter: FakeDrafter
) -> None:
    served.grow("a", 20)
    served.propose("a")
    served.close("a")
    served.texts["a"] = TEXT[100:130]
    assert served.propose("a") != [[]]
    assert [key[1] for key in drafter.forgotten] == [0]
    assert [row.key[1] for call in drafter.calls for row in call] == [0, 1]


def test_the_end_of_a_text_that_was_never_sent_is_not_sent(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    server = serve(stack, place, drafter)
    made = replica(stack, place, dynamic=True)
    made.until_up()
    for name in ("unsent", "sent"):
        made.grow(name, 20)
        made.propose(name, limit=0 if name == "unsent" else 3)
        made.close(name)
    eventually(lambda: drafter.forgotten, "the end of the sent text", WAIT_S, 0.005)
    assert [key[1] for key in drafter.forgotten] == [1]
    assert server.counters.num_rows == 1


def test_requests_without_drafts_of_this_source_are_not_sent(
    served: Replica, drafter: FakeDrafter
) -> None:
    names = ("a", "b", "c", "d")
    for name in names:
        served.grow(name, 20)
    served.controls = {
        "a": RequestControls(speculation="off"),
        "b": RequestControls(speculation="ngram"),
        "c": RequestControls(max_draft_tokens=0),
        "d": RequestControls(speculation="draft_model"),
    }
    assert [bool(draft) for draft in served.propose(*names)] == [False, False, False, True]
    assert [len(call) for call in drafter.calls] == [1]


def test_only_texts_of_one_tenant_adapter_and_salt_share_a_prefix(
    served: Replica, drafter: FakeDrafter
) -> None:
    names = tuple("abcdefg")
    for name in names:
        served.grow(name, 20)
    secret = RequestControls(tenant="x", learn=False)
    served.controls = {
        "a": RequestControls(tenant="x"),
        "b": RequestControls(tenant="x"),
        "c": RequestControls(tenant="y"),
        "d": RequestControls(tenant="x", adapter="l"),
        "e": RequestControls(tenant="x", cache_salt="s"),
        "f": secret,
        "g": secret,
    }
    served.propose(*names)
    salts = [row.salt for row in sorted(drafter.calls[0], key=lambda row: row.key[1])]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 6


def test_an_ended_source_leaves_no_thread(place: Place) -> None:
    before = set(threading.enumerate())
    context = SourceContext(find_drafter=lambda config: place)
    DrafterClient(DraftModelConfig(kind="draft_model", model="m"), context)
    assert set(threading.enumerate()) - before
    for end in context.exits:
        end()
    assert not set(threading.enumerate()) - before


def test_a_draft_has_its_drafters_confidence(served: Replica, drafter: FakeDrafter) -> None:
    drafter.chances = (1.0, 0.5, 0.0)
    served.texts["a"] = TEXT[:20]
    served.propose("a", limit=2)
    assert served.confidence[0, :2].tolist() == pytest.approx([1.0, 0.5], abs=1 / 255)


def test_a_dynamic_source_sends_no_text_before_a_draft_is_wanted(
    stack: ExitStack, place: Place, drafter: FakeDrafter
) -> None:
    serve(stack, place, drafter)
    made = replica(stack, place, dynamic=True)
    made.until_up()
    made.grow("new", 5 * NEAR_TOKENS)
    for _ in range(5):
        made.propose("new", limit=0)
    made.grow("short", 5)
    assert made.propose("short") != [[]]  # comes after all earlier requests
    assert len(drafter.calls) == 1
    made.until_drafts("new")


def test_the_reading_time_of_a_text_is_estimated_after_a_measurement(
    stack: ExitStack, place: Place, drafter: FakeDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(stack, place, drafter)
    made = replica(stack, place, dynamic=True)
    made.until_up()
    for name in ("first", "second", "longer"):
        made.grow(name, 5 * NEAR_TOKENS)
    made.grow("longer", 10 * NEAR_TOKENS)
    made.grow("short", NEAR_TOKENS)
    assert made.reading_s("first", "short") == [0.0, 0.0]
    drafter.may_go.clear()
    made.propose("first")
    assert drafter.entered.wait(WAIT_S)
    time.sleep(0.05)
    drafter.may_go.set()
    made.until_drafts("first")
    names = ("first", "second", "longer", "short")
    first, second, longer, short = made.reading_s(*names)
    assert (first, short) == (0.0, 0.0)
    assert second > 0.04
    assert longer == pytest.approx(2 * second)
    monkeypatch.setattr(made.source, "_has_own_gpu", True)
    assert made.reading_s(*names) == [0.0] * 4
    drafter.may_go.clear()
    made.propose("second")
    assert made.reading_s("second") == [math.inf]  # the drafter reads it now
