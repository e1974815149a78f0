from __future__ import annotations

import math
import time

import pytest

from specserve.sources.sent_requests import SentRequests, Text
from specserve.wire.messages import DraftAnswer, Refusal, RowAnswer


def answer(number: int, compute_s: float = 0.0, held: int = 100) -> DraftAnswer:
    return DraftAnswer(number, (RowAnswer(held),), compute_s)


def test_an_answer_ends_its_request_once() -> None:
    sent = SentRequests()
    text = Text(1, 0)
    number = sent.add([text], 10, 0, 60.0)
    assert (text.is_sent, len(sent), sent.state_bytes) == (True, 1, 10)
    assert sent.take(answer(number + 1)) is None
    request = sent.take(answer(number))
    assert request is not None
    assert request.texts == [text]
    assert sent.take(answer(number)) is None
    assert (text.is_sent, len(sent), sent.state_bytes) == (False, 0, 0)


def test_texts_of_requests_that_are_given_up_may_go_out_again() -> None:
    sent = SentRequests()
    short, long = Text(1, 0), Text(2, 0)
    sent.add([short], 0, 0, -1.0)
    kept = sent.add([long], 0, 300, 60.0)
    sent.give_up(-math.inf)
    assert len(sent) == 2
    sent.give_up(time.monotonic())
    assert (short.is_sent, long.is_sent) == (False, True)
    answered = sent.take(answer(kept))
    assert answered is not None
    assert (answered.texts, answered.num_read) == ([long], 300)


def test_reading_is_measured_by_answers_to_texts_that_were_only_read() -> None:
    sent = SentRequests()
    sent.take(answer(sent.add([Text(1, 0)], 0, 0, 1.0), 5.0))
    sent.take(Refusal(sent.add([Text(1, 0)], 0, 100, 1.0), "failed"))
    sent.take(answer(sent.add([Text(1, 0)], 0, 100, 1.0), 0.2, held=0))  # has no room for it
    assert sent.position_s == 0
    sent.take(answer(sent.add([Text(1, 0)], 0, 100, 1.0), 0.2))
    assert sent.position_s == pytest.approx(0.002)
    sent.take(answer(sent.add([Text(1, 0)], 0, 100, 1.0), 0.4))
    assert sent.position_s == pytest.approx(0.0022)
