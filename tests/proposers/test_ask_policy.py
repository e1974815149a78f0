"""Whether a model in another process is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from specserve.core.types import Draft, Int32Array
from specserve.proposers.ask_policy import (
    MOST_CREDIT,
    MOST_PAUSE,
    MOST_REST,
    MOST_RETRIES,
    AskPolicy,
)
from specserve.proposers.gate import Gate

PLAIN_S = 0.01
MTP = Draft((1, 2, 3), "mtp")
NAMES = ["request 0", "request 1"]
SURE = Draft((1, 2, 3), "trie_local", match_len=20)


def taught(*observed: tuple[Draft, int]) -> Gate:
    """A gate that knows steps of 10 ms, and what was accepted of drafts."""
    gate = Gate()
    for draft, num_accepted in observed:
        for _ in range(200):
            gate.acceptance.observe("teacher", draft, (*draft.tokens[:num_accepted], -1))
    for _ in range(30):
        gate.observe_step(1, 0, PLAIN_S)
        gate.observe_step(1, 3, 1.03 * PLAIN_S)
    return gate


def priced(gate: Gate, share: float) -> AskPolicy:
    """A policy whose calls were seen to take this share of a plain step, whatever is asked."""
    policy = AskPolicy("mtp", gate)
    policy.limits(["first"], limits(3), [[]])
    for _ in range(60):
        for length in (1, 3):
            policy.observe_call(["teacher"], limits(length), [MTP], share * PLAIN_S)
    for _ in range(100):
        if not policy.limits(["spender"], limits(3), [[]]).any():
            break  # has spent what it may spend on probes
    return policy


def limits(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


def asked(policy: AskPolicy, *offers: Sequence[Draft]) -> list[int]:
    names = [f"request {row}" for row in range(len(offers))]
    found: list[int] = policy.limits(names, limits(*[3] * len(offers)), offers).tolist()
    return found


def test_it_is_asked_where_what_it_brings_is_worth_the_wait() -> None:
    gate = taught((MTP, 3), (SURE, 3))
    assert asked(priced(gate, 0.3), ()) == [3]


def test_it_is_not_asked_where_it_takes_longer_than_it_brings() -> None:
    gate = taught((MTP, 1), (SURE, 3))
    assert asked(priced(gate, 1.5), ()) == [0]


def test_it_is_not_asked_before_it_is_known_what_steps_cost_unless_that_cannot_be_known() -> None:
    gate = Gate()
    policy = AskPolicy("mtp", gate)
    num_silent = 0
    while not asked(policy, (), ())[0]:
        num_silent += 1
        assert num_silent < 20
        gate.trim(["request 0", "request 1"], [Draft((), "mtp"), Draft((), "mtp")])
    assert num_silent > 4


def test_only_as_many_tokens_are_asked_for_as_are_likely() -> None:
    gate = taught((MTP, 1), (SURE, 3))
    policy = priced(gate, 0.3)
    for _ in range(60):
        policy.observe_call(["teacher"], limits(1), [MTP], 0.1 * PLAIN_S)
        policy.observe_call(["teacher"], limits(3), [MTP], 0.3 * PLAIN_S)
    assert asked(policy, ()) == [1]


def test_a_request_that_has_a_better_draft_already_is_left_out() -> None:
    gate = taught((MTP, 1), (SURE, 3))
    assert asked(priced(gate, 0.1), (SURE,), ()) == [0, 1]


def test_a_drafter_that_is_away_does_not_pass_for_a_quick_one() -> None:
    policy = priced(taught((MTP, 1), (SURE, 3)), 1.5)
    for _ in range(60):
        policy.observe_call(["teacher"], limits(3), [Draft((), "mtp")], 1e-5)
    assert asked(policy, ()) == [0]


def test_what_is_never_asked_is_probed_for_a_hundredth_of_the_time() -> None:
    policy = priced(taught((MTP, 0), (SURE, 3)), 0.5)
    num_steps = 2000
    num_probes = sum(any(asked(policy, (), ())) for _ in range(num_steps))
    assert 0 < num_probes * 0.5 <= 0.011 * num_steps + MOST_CREDIT


def test_one_request_is_probed_and_the_more_seldom_the_longer_nothing_comes_of_it() -> None:
    policy = priced(taught((MTP, 0), (SURE, 3)), 0.1)
    probes = []
    for step in range(3000):
        found = asked(policy, (), ())
        assert found in ([0, 0], [3, 0])
        if any(found):
            policy.observe_call(NAMES, limits(*found), [MTP, Draft((), "mtp")], 0.1 * PLAIN_S)
            probes.append(step)
    pauses = [after - before for before, after in pairwise(probes)]
    assert MOST_PAUSE <= pauses[-1] <= MOST_PAUSE + MOST_REST
    assert len(probes) < 30


def test_one_that_is_not_asked_is_thought_about_less_often_until_the_requests_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = taught((MTP, 0), (SURE, 3))
    policy = priced(gate, 1.5)
    thoughts: list[str] = []
    gains = gate.acceptance.prefix_probabilities

    def counted(request_id: str, draft: Draft) -> list[float]:
        thoughts.append(request_id)
        return gains(request_id, draft)

    monkeypatch.setattr(gate.acceptance, "prefix_probabilities", counted)
    for _ in range(100):
        policy.limits(["old"], limits(3), [[]])
    assert 100 / (MOST_REST + 1) <= thoughts.count("old") < 35
    policy.limits(["old", "new"], limits(3, 3), [[], []])
    assert thoughts[-1] == "new"


def test_a_request_that_could_not_be_better_off_is_not_probed() -> None:
    policy = priced(taught((MTP, 0), (SURE, 3)), 0.1)
    assert not any(any(asked(policy, (SURE,))) for _ in range(1000))


def test_a_probe_that_is_not_answered_yet_is_sent_again_in_the_next_steps() -> None:
    policy = priced(taught((MTP, 0), (SURE, 3)), 0.01)
    while not any(asked(policy, ())):
        pass
    for _ in range(MOST_RETRIES):
        policy.observe_call(["teacher"], limits(3), [Draft((), "mtp")], 1e-5)
        assert asked(policy, ()) == [3]
    policy.observe_call(["teacher"], limits(3), [Draft((), "mtp")], 1e-5)
    assert asked(policy, ()) == [0]


def test_a_source_that_gets_better_is_found_by_its_probes() -> None:
    gate = taught((MTP, 0), (SURE, 3))
    policy = priced(gate, 0.2)
    assert asked(policy, ()) == [0]
    last = [0, 0, 0]
    for _ in range(40_000):
        last = [*last[1:], asked(policy, ())[0]]
        if last[-1]:
            gate.acceptance.observe("request 0", MTP.cut(last[-1]), MTP.tokens)
        if all(last):
            return
    pytest.fail("never asked for good")


def test_the_same_history_gives_the_same_decisions() -> None:
    runs = [
        [asked(policy, ()) for _ in range(300)]
        for policy in (priced(taught((MTP, 1), (SURE, 3)), 0.4) for _ in range(2))
    ]
    assert runs[0] == runs[1]


def test_a_text_is_read_once_its_drafts_would_have_saved_as_much_as_that_takes() -> None:
    policy = priced(taught((MTP, 3), (SURE, 3)), 0.3)

    def asked_for(name: str, reading_s: float) -> bool:
        return bool(policy.limits([name], limits(3), [[]], lambda: [reading_s]).any())

    def num_missed(name: str, reading_s: float) -> int:
        return next(number for number in range(100) if asked_for(name, reading_s))

    assert num_missed("known", 0.0) == 0
    assert num_missed("unread", 5 * PLAIN_S) == 7  # a draft saves 0.65 of a plain step
    assert asked_for("unread", 4 * PLAIN_S)  # a piece of it was read
    policy.observe_call(["unread"], limits(3), [MTP], 0.3 * PLAIN_S)
    assert num_missed("unread", 5 * PLAIN_S) == 7  # the drafter has lost it
    policy.forget(["unread"])
    assert num_missed("unread", 5 * PLAIN_S) == 7


def test_a_call_is_paid_for_by_the_texts_that_are_read() -> None:
    gate = taught((MTP, 3), (SURE, 3))
    for _ in range(20):
        gate.observe_step(8, 0, PLAIN_S)
        gate.observe_step(8, 24, 1.1 * PLAIN_S)
    policy = priced(gate, 1.0)
    names, unread = [f"{number}" for number in range(8)], 100 * PLAIN_S
    offers: list[list[Draft]] = [[]] * 8

    def num_asked(num_read: int) -> int:
        times = [0.0] * num_read + [unread] * (8 - num_read)
        return int(np.count_nonzero(policy.limits(names, limits(*[3] * 8), offers, lambda: times)))

    assert num_asked(8) == 8
    assert num_asked(1) == 0
    assert num_asked(7) == 7


def test_a_text_that_is_too_long_keeps_no_other_from_being_probed() -> None:
    policy = priced(taught((MTP, 0), (SURE, 3)), 0.3)
    probed = [
        policy.limits(["long", "a"], limits(3, 3), [[], []], lambda: [math.nan, 0.0]).tolist()
        for _ in range(1000)
    ]
    assert {tuple(each) for each in probed} == {(0, 0), (0, 3)}


def test_a_text_that_no_draft_can_come_of_now_is_neither_asked_for_nor_probed() -> None:
    for num_accepted in (0, 3):
        policy = priced(taught((MTP, num_accepted), (SURE, 3)), 0.3)
        found = [
            policy.limits(["a"], limits(3), [[]], lambda: [math.inf]).any() for _ in range(1000)
        ]
        assert not any(found)


def test_texts_that_are_known_do_not_wait_for_those_that_are_not() -> None:
    policy = priced(taught((MTP, 3), (SURE, 3)), 0.3)
    found = policy.limits(["known", "unread"], limits(3, 3), [[], []], lambda: [0.0, 100.0])
    assert found[0] > 0
    assert found[1] == 0


def test_what_would_not_be_asked_is_probed_also_where_it_was_not_read() -> None:
    policy = priced(taught((MTP, 0), (SURE, 3)), 0.5)
    assert any(policy.limits(["a"], limits(3), [[]], lambda: [1.0]).any() for _ in range(1000))


def test_the_length_asked_of_a_text_that_is_only_read_is_not_taken_for_the_calls() -> None:
    policy = priced(taught((MTP, 0), (SURE, 3)), 0.5)
    for _ in range(200):
        policy.observe_call(NAMES, limits(1, 3), [MTP, Draft((), "mtp")], 0.5 * PLAIN_S)
    assert policy._price(1, 1, PLAIN_S) == pytest.approx(0.5, rel=0.1)
