"""Whether a model in another process is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from specserve.core.types import Draft, Int32Array
from specserve.proposers.gate import Gate
from specserve.proposers.inquiry import (
    MOST_CREDIT,
    MOST_PAUSE,
    MOST_REST,
    MOST_RETRIES,
    Asked,
    Inquiry,
)

PLAIN_S = 0.01
MTP = Draft((1, 2, 3), "mtp")
NAMES = ["request 0", "request 1"]
SURE = Draft((1, 2, 3), "trie_local", match_len=20)


def taught(*lessons: tuple[Draft, int]) -> Gate:
    """A gate that knows steps of 10 ms, and what was accepted of drafts."""
    gate = Gate()
    for draft, num_accepted in lessons:
        for _ in range(200):
            gate.acceptance.observe("teacher", draft, (*draft.tokens[:num_accepted], -1))
    for _ in range(30):
        gate.observe_step(1, 0, PLAIN_S)
        gate.observe_step(1, 3, 1.03 * PLAIN_S)
    return gate


def priced(gate: Gate, share: float) -> Inquiry:
    """An inquiry whose calls were seen to take this share of a plain step, whatever is asked."""
    inquiry = Inquiry("mtp", gate, 3)
    inquiry.ask(["first"], limits(3), [[]])
    for _ in range(60):
        for length in (1, 3):
            inquiry.observe_call(["teacher"], Asked(limits(length)), [MTP], share * PLAIN_S)
    for _ in range(100):
        if not inquiry.ask(["spender"], limits(3), [[]]).lengths.any():
            break  # has spent what it may spend on probes
    return inquiry


def limits(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


def asked(inquiry: Inquiry, *offers: Sequence[Draft]) -> list[int]:
    names = [f"request {row}" for row in range(len(offers))]
    found: list[int] = inquiry.ask(names, limits(*[3] * len(offers)), offers).lengths.tolist()
    return found


def test_it_is_asked_where_what_it_brings_is_worth_the_wait() -> None:
    gate = taught((MTP, 3), (SURE, 3))
    assert asked(priced(gate, 0.3), ()) == [3]


def test_it_is_not_asked_where_it_takes_longer_than_it_brings() -> None:
    gate = taught((MTP, 1), (SURE, 3))
    assert asked(priced(gate, 1.5), ()) == [0]


def test_it_is_not_asked_before_it_is_known_what_steps_cost_unless_that_cannot_be_known() -> None:
    gate = Gate()
    inquiry = Inquiry("mtp", gate, 3)
    num_silent = 0
    while not asked(inquiry, (), ())[0]:
        num_silent += 1
        assert num_silent < 20
        gate.trim(["request 0", "request 1"], [Draft((), "mtp"), Draft((), "mtp")])
    assert num_silent > 4


def test_only_as_many_tokens_are_asked_for_as_are_likely() -> None:
    gate = taught((MTP, 1), (SURE, 3))
    inquiry = priced(gate, 0.3)
    for _ in range(60):
        inquiry.observe_call(["teacher"], Asked(limits(1)), [MTP], 0.1 * PLAIN_S)
        inquiry.observe_call(["teacher"], Asked(limits(3)), [MTP], 0.3 * PLAIN_S)
    assert asked(inquiry, ()) == [1]


def test_a_request_that_has_a_better_draft_already_is_left_out() -> None:
    gate = taught((MTP, 1), (SURE, 3))
    assert asked(priced(gate, 0.1), (SURE,), ()) == [0, 1]


def test_a_drafter_that_is_away_does_not_pass_for_a_quick_one() -> None:
    inquiry = priced(taught((MTP, 1), (SURE, 3)), 1.5)
    for _ in range(60):
        inquiry.observe_call(["teacher"], Asked(limits(3)), [Draft((), "mtp")], 1e-5)
    assert asked(inquiry, ()) == [0]


def test_what_is_never_asked_is_probed_for_a_hundredth_of_the_time() -> None:
    inquiry = priced(taught((MTP, 0), (SURE, 3)), 0.5)
    num_steps = 2000
    num_probes = sum(any(asked(inquiry, (), ())) for _ in range(num_steps))
    assert 0 < num_probes * 0.5 <= 0.011 * num_steps + MOST_CREDIT


def test_one_request_is_probed_and_the_more_seldom_the_longer_nothing_comes_of_it() -> None:
    inquiry = priced(taught((MTP, 0), (SURE, 3)), 0.1)
    probes = []
    for step in range(3000):
        found = asked(inquiry, (), ())
        assert found in ([0, 0], [3, 0])
        if any(found):
            inquiry.observe_call(
                NAMES, Asked(limits(*found)), [MTP, Draft((), "mtp")], 0.1 * PLAIN_S
            )
            probes.append(step)
    pauses = [after - before for before, after in pairwise(probes)]
    assert MOST_PAUSE <= pauses[-1] <= MOST_PAUSE + MOST_REST
    assert len(probes) < 30


def test_one_that_is_not_asked_is_thought_about_less_often_until_the_requests_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = taught((MTP, 0), (SURE, 3))
    inquiry = priced(gate, 1.5)
    thoughts: list[str] = []
    gains = gate.acceptance.gains

    def counted(request_id: str, draft: Draft) -> list[float]:
        thoughts.append(request_id)
        return gains(request_id, draft)

    monkeypatch.setattr(gate.acceptance, "gains", counted)
    for _ in range(100):
        inquiry.ask(["old"], limits(3), [[]])
    assert 100 / (MOST_REST + 1) <= thoughts.count("old") < 35
    inquiry.ask(["old", "new"], limits(3, 3), [[], []])
    assert thoughts[-1] == "new"


def test_a_request_that_could_not_be_better_off_is_not_probed() -> None:
    inquiry = priced(taught((MTP, 0), (SURE, 3)), 0.1)
    assert not any(any(asked(inquiry, (SURE,))) for _ in range(1000))


def test_a_probe_that_is_not_answered_yet_is_sent_again_in_the_next_steps() -> None:
    inquiry = priced(taught((MTP, 0), (SURE, 3)), 0.01)
    while not any(asked(inquiry, ())):
        pass
    for _ in range(MOST_RETRIES):
        inquiry.observe_call(["teacher"], Asked(limits(3)), [Draft((), "mtp")], 1e-5)
        assert asked(inquiry, ()) == [3]
    inquiry.observe_call(["teacher"], Asked(limits(3)), [Draft((), "mtp")], 1e-5)
    assert asked(inquiry, ()) == [0]


def test_a_source_that_gets_better_is_found_by_its_probes() -> None:
    gate = taught((MTP, 0), (SURE, 3))
    inquiry = priced(gate, 0.2)
    assert asked(inquiry, ()) == [0]
    last = [0, 0, 0]
    for _ in range(40_000):
        last = [*last[1:], asked(inquiry, ())[0]]
        if last[-1]:
            gate.acceptance.observe("request 0", MTP.cut(last[-1]), MTP.tokens)
        if all(last):
            return
    pytest.fail("never asked for good")


def test_the_same_history_gives_the_same_decisions() -> None:
    runs = [
        [asked(inquiry, ()) for _ in range(300)]
        for inquiry in (priced(taught((MTP, 1), (SURE, 3)), 0.4) for _ in range(2))
    ]
    assert runs[0] == runs[1]


def test_a_text_is_read_once_its_drafts_would_have_saved_as_much_as_that_takes() -> None:
    inquiry = priced(taught((MTP, 3), (SURE, 3)), 0.3)

    def asked_for(name: str, reading_s: float) -> bool:
        return bool(inquiry.ask([name], limits(3), [[]], lambda: [reading_s]).lengths.any())

    def num_missed(name: str, reading_s: float) -> int:
        return next(number for number in range(100) if asked_for(name, reading_s))

    assert num_missed("known", 0.0) == 0
    assert num_missed("unread", 5 * PLAIN_S) == 7  # a draft saves 0.65 of a plain step
    assert asked_for("unread", 4 * PLAIN_S)  # a piece of it was read
    inquiry.observe_call(["unread"], Asked(limits(3)), [MTP], 0.3 * PLAIN_S)
    assert num_missed("unread", 5 * PLAIN_S) == 7  # the drafter has lost it
    inquiry.forget(["unread"])
    assert num_missed("unread", 5 * PLAIN_S) == 7


def test_a_call_is_paid_for_by_the_texts_that_are_read() -> None:
    gate = taught((MTP, 3), (SURE, 3))
    for _ in range(20):
        gate.observe_step(8, 0, PLAIN_S)
        gate.observe_step(8, 24, 1.1 * PLAIN_S)
    inquiry = priced(gate, 1.0)
    names, unread = [f"{number}" for number in range(8)], 100 * PLAIN_S
    offers: list[list[Draft]] = [[]] * 8

    def num_asked(num_read: int) -> int:
        times = [0.0] * num_read + [unread] * (8 - num_read)
        return int(
            np.count_nonzero(inquiry.ask(names, limits(*[3] * 8), offers, lambda: times).lengths)
        )

    assert num_asked(8) == 8
    assert num_asked(1) == 0
    assert num_asked(7) == 7


def test_a_text_that_is_too_long_keeps_no_other_from_being_probed() -> None:
    inquiry = priced(taught((MTP, 0), (SURE, 3)), 0.3)
    probed = [
        inquiry.ask(["long", "a"], limits(3, 3), [[], []], lambda: [math.nan, 0.0]).lengths.tolist()
        for _ in range(1000)
    ]
    assert {tuple(each) for each in probed} == {(0, 0), (0, 3)}


def test_a_text_that_no_draft_can_come_of_now_is_neither_asked_for_nor_probed() -> None:
    for num_accepted in (0, 3):
        inquiry = priced(taught((MTP, num_accepted), (SURE, 3)), 0.3)
        found = [
            inquiry.ask(["a"], limits(3), [[]], lambda: [math.inf]).lengths.any()
            for _ in range(1000)
        ]
        assert not any(found)


def test_texts_that_are_known_do_not_wait_for_those_that_are_not() -> None:
    inquiry = priced(taught((MTP, 3), (SURE, 3)), 0.3)
    found = inquiry.ask(["known", "unread"], limits(3, 3), [[], []], lambda: [0.0, 100.0]).lengths
    assert found[0] > 0
    assert found[1] == 0


def test_what_would_not_be_asked_is_probed_also_where_it_was_not_read() -> None:
    inquiry = priced(taught((MTP, 0), (SURE, 3)), 0.5)
    assert any(
        inquiry.ask(["a"], limits(3), [[]], lambda: [1.0]).lengths.any() for _ in range(1000)
    )


SHORT = Draft((1, 2), "trie_local", match_len=20)
WHOLE = MTP.behind(SHORT)


def behind_short(
    *lessons: tuple[Draft, int], is_serial: bool = False, share: float = 0.1
) -> Inquiry:
    """An inquiry whose calls take this share of a plain step for each forward."""
    gate = taught((SHORT, 2), *lessons)
    inquiry = Inquiry("mtp", gate, 3, is_serial=is_serial)
    inquiry.ask(["first"], limits(3), [[]])
    for _ in range(60):
        for length in (1, 3):
            found = Asked(limits(length), {0: SHORT} if is_serial else {})
            seconds = share * (length + 2 * is_serial) * PLAIN_S
            inquiry.observe_call(["teacher"], found, [MTP], seconds)
    return inquiry


def lengths_asked(inquiry: Inquiry, limit: int, *offers: Draft) -> tuple[int, bool]:
    """Of a draft for one request; whether it is to continue the first offer."""
    found = inquiry.ask(["a"], limits(limit), [offers])
    return int(found.lengths[0]), bool(offers) and found.continued == {0: offers[0]}


def test_a_short_draft_is_continued_from_its_end() -> None:
    found = behind_short((MTP, 1), (WHOLE, 5)).ask(["a", "b"], limits(9, 3), [[SHORT], [SURE]])
    assert found.lengths.tolist() == [3, 0]
    assert found.continued == {0: SHORT}


@pytest.mark.parametrize(("limit", "length"), [(2, 0), (3, 1), (4, 2), (5, 3)])
def test_a_draft_is_continued_as_far_as_there_is_room(limit: int, length: int) -> None:
    inquiry = behind_short((MTP, 1), (WHOLE, 5))
    assert lengths_asked(inquiry, limit, SHORT) == (length, length > 0)


def test_a_draft_is_not_continued_where_that_is_never_right_or_its_end_not_reached() -> None:
    assert not any(lengths_asked(behind_short((MTP, 0), (WHOLE, 2)), 5, SHORT)[1] for _ in range(9))
    wrong = Draft((1, 2, 3), "ngram", match_len=2)
    inquiry = behind_short((MTP, 0), (WHOLE, 5), (wrong, 0))
    assert not any(lengths_asked(inquiry, 9, wrong)[1] for _ in range(1000))


def test_forwards_for_what_is_continued_are_paid_for() -> None:
    known = (MTP, 0), (WHOLE, 5)
    assert lengths_asked(behind_short(*known, share=0.25), 5, SHORT) == (3, True)
    assert lengths_asked(behind_short(*known, share=0.05, is_serial=True), 5, SHORT) == (3, True)
    dear = behind_short(*known, share=0.25, is_serial=True)
    assert sum(lengths_asked(dear, 5, SHORT)[0] > 0 for _ in range(1000)) < 20  # probes


def test_a_long_draft_is_not_gone_through_token_by_token() -> None:
    long = Draft((1, 2, 3, 4, 5), "trie_local", match_len=20)
    known = (long, 5), (MTP.behind(long), 8)
    assert lengths_asked(behind_short(*known), 8, long) == (3, True)
    assert lengths_asked(behind_short(*known, is_serial=True), 8, long) == (0, False)


def test_a_new_draft_is_asked_for_where_continuing_the_one_that_there_is_takes_too_long() -> None:
    weak = Draft((1, 2), "ngram", match_len=2)
    inquiry = behind_short((MTP, 3), (MTP.behind(weak), 5), share=0.2, is_serial=True)
    for number in range(400):
        num_right = 2 if number % 2 else 0
        inquiry._gate.acceptance.observe("teacher", weak, (*weak.tokens[:num_right], -1))
    assert lengths_asked(inquiry, 9, weak) == (3, False)


def test_continuing_is_probed_and_found_to_have_become_worth_it() -> None:
    inquiry = behind_short((MTP, 0), (WHOLE, 2))
    last = [False, False, False]
    for _ in range(40_000):
        length, is_continued = lengths_asked(inquiry, 5, SHORT)
        last = [*last[1:], is_continued]
        if is_continued:
            tokens = WHOLE.tokens[: 2 + length]
            inquiry._gate.acceptance.observe("a", WHOLE.cut(2 + length), tokens)
        if all(last):
            return
    pytest.fail("never continued for good")


@pytest.mark.parametrize(("share", "of_both"), [(0.2, True), (0.6, False)])
def test_a_new_draft_and_a_continuation_are_probed_in_turns_if_there_can_be_credit_for_both(
    share: float, of_both: bool
) -> None:
    inquiry = behind_short((MTP, 0), (WHOLE, 2), is_serial=True, share=share)
    probed = [lengths_asked(inquiry, 5, SHORT) for _ in range(5000)]
    is_continued = [each for length, each in probed if length]
    assert len(is_continued) > 10
    assert is_continued.count(True) == pytest.approx(len(is_continued) / 2 if of_both else 0, abs=1)


def test_continuing_is_tried_also_where_a_new_draft_would_do() -> None:
    weak = Draft((1, 2), "ngram", match_len=20)
    inquiry = behind_short((MTP, 3), (weak, 2))
    for number in range(400):
        num_right = 0 if number % 4 == 0 else 2
        inquiry._gate.acceptance.observe("teacher", weak, (*weak.tokens[:num_right], -1))
    assert lengths_asked(inquiry, 9, weak) == (3, False)
    for _ in range(2000):
        _, is_continued = lengths_asked(inquiry, 9, weak)
        if is_continued:
            inquiry._gate.acceptance.observe("a", MTP.behind(weak), (1, 2, 1, 2, 3))
    assert [lengths_asked(inquiry, 9, weak)[1] for _ in range(20)].count(True) == 20


def test_each_request_gets_what_is_best_for_it() -> None:
    long = Draft((1, 2, 3, 4), "ngram", match_len=2)
    inquiry = behind_short((MTP, 3), (WHOLE, 5), (long, 1), is_serial=True, share=0.02)
    found = inquiry.ask(["a", "b"], limits(9, 9), [[SHORT], [long]])
    assert found.lengths.tolist() == [3, 3]
    assert found.continued == {0: SHORT}


def test_forwards_of_a_text_that_is_only_read_are_not_taken_for_the_calls() -> None:
    inquiry = behind_short((MTP, 0), (WHOLE, 5), is_serial=True)
    found = Asked(limits(1, 3), {1: SHORT})
    for _ in range(200):
        inquiry.observe_call(["a", "b"], found, [MTP, Draft((), "mtp")], 0.5 * PLAIN_S)
    assert inquiry._price(1, 1, PLAIN_S) == pytest.approx(0.5, rel=0.1)
