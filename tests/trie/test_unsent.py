from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from specserve.core.metrics import LinkSnapshot
from specserve.trie.records import TextPiece
from specserve.trie.unsent import CHECK_S, FULL_TOKENS, MAX_DELAY_S, UnsentTexts

TEXT = np.random.default_rng(0).integers(0, 30_000, (2, 5000)).astype(np.int32)


@dataclass
class Published:
    """Published pieces: (name, start, num_tokens, final, stamp)."""

    pieces: list[tuple[str, int, int, bool, float]] = field(default_factory=list)
    began = 0.0

    def publish(self, piece: TextPiece) -> None:
        namespace, sequence, start, tokens, final, stamp, self.began = piece
        assert namespace == "tenant"
        assert tokens.tolist() == TEXT[int(sequence), start : start + len(tokens)].tolist()
        self.pieces.append((sequence, start, len(tokens), final, stamp))

    def link(self) -> LinkSnapshot:
        return LinkSnapshot(True, 0.0, 0, 0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Texts:
    """Two requests, in slots 3 and 1."""

    def __init__(self) -> None:
        self.published, self.clock = Published(), Clock()
        self.wall_ahead_s = 0.0
        self.unsent = UnsentTexts(
            self.published, 4, self.clock, lambda: self.clock() + self.wall_ahead_s
        )
        self.slots = np.array([3, 1])
        for name, slot in enumerate(self.slots.tolist()):
            self.unsent.open(slot, "tenant", str(name))
        self._ends = np.zeros(2, np.int64)

    def grow(self, *ends: int) -> list[tuple[str, int, int, bool, float]]:
        """Runs a step and returns the pieces that it publishes."""
        begins, self._ends = self._ends, np.array(ends, np.int64)
        batch = self.slots, TEXT.copy(), self._ends.astype(np.int32), np.full(2, 30, np.int32)
        return self.sent(lambda: self.unsent.add(batch, begins, self._ends))

    def sent(self, call: object) -> list[tuple[str, int, int, bool, float]]:
        self.published.pieces.clear()
        assert callable(call)
        call()
        return list(self.published.pieces)


@pytest.fixture
def texts() -> Texts:
    return Texts()


def test_a_short_piece_waits_and_a_full_one_is_sent(texts: Texts) -> None:
    assert texts.grow(40, 50) == []
    assert texts.grow(FULL_TOKENS - 1, 55) == []
    assert texts.grow(FULL_TOKENS + 2, 60) == [("0", 0, FULL_TOKENS + 2, False, 100.0)]
    assert texts.grow(FULL_TOKENS + 5, 60) == []
    texts.clock.now += MAX_DELAY_S
    assert texts.grow(FULL_TOKENS + 7, 60) == [
        ("1", 0, 60, False, 100.0),
        ("0", FULL_TOKENS + 2, 5, False, 100.0),
    ]
    texts.clock.now += CHECK_S
    assert texts.grow(FULL_TOKENS + 8, 60) == []


def test_a_long_prompt_is_sent_at_once(texts: Texts) -> None:
    assert texts.grow(4000, 5) == [("0", 0, 4000, False, 100.0)]


def test_the_end_of_a_text_is_sent_when_its_request_ends(texts: Texts) -> None:
    texts.grow(40, 20)
    texts.clock.now += 1.0
    assert texts.sent(lambda: texts.unsent.close(3)) == [("0", 0, 40, True, 100.0)]
    assert texts.sent(lambda: texts.unsent.close(3)) == []
    assert texts.sent(lambda: texts.unsent.close(1)) == [("1", 0, 20, True, 100.0)]


def test_a_text_without_unsent_tokens_is_closed(texts: Texts) -> None:
    texts.grow(FULL_TOKENS, 0)
    assert texts.sent(lambda: texts.unsent.close(3)) == [("0", FULL_TOKENS, 0, True, 100.0)]


def test_text_of_a_request_outside_the_batch_is_sent(texts: Texts) -> None:
    texts.grow(40, 20)
    texts.clock.now += MAX_DELAY_S
    nothing = np.zeros(0, np.int64)
    batch = nothing, TEXT[:0].copy(), nothing.astype(np.int32), nothing.astype(np.int32)
    sent = texts.sent(lambda: texts.unsent.add(batch, nothing, nothing))
    assert [each[:3] for each in sent] == [("1", 0, 20), ("0", 0, 40)]


def test_a_text_that_is_not_shared_is_not_sent(texts: Texts) -> None:
    texts.slots = np.array([0, 1])
    assert texts.grow(4000, 4000) == [("1", 0, 4000, False, 100.0)]
    assert texts.sent(lambda: texts.unsent.close(0)) == []


def test_a_failed_step_leaves_a_gap_without_text_of_other_requests(
    texts: Texts,
) -> None:
    texts.unsent._tails.tokens[:] = 7  # of a former request
    texts.grow(20, 0)
    texts._ends = np.array([25, 0])  # learned, but never added
    texts.grow(30, 0)
    assert texts.sent(lambda: texts.unsent.close(3)) == [("0", 25, 5, True, 100.0)]


def test_pieces_are_sent_in_time_although_the_wall_clock_is_set_back(texts: Texts) -> None:
    assert texts.grow(1, 1) == []
    texts.wall_ahead_s = -60.0
    texts.clock.now += MAX_DELAY_S + CHECK_S
    assert sorted(piece[:3] for piece in texts.grow(2, 2)) == [("0", 0, 2), ("1", 0, 2)]


def test_each_piece_says_when_its_text_began() -> None:
    texts = Texts()
    began = texts.clock.now
    for end in (FULL_TOKENS, 2 * FULL_TOKENS):
        texts.clock.now += 10.0
        assert texts.grow(end, 0)
        assert texts.published.began == began


def test_a_text_may_have_begun_before_it_is_opened() -> None:
    texts = Texts()
    texts.unsent.open(3, "tenant", "0", began=texts.clock.now - 10.0)
    assert texts.grow(FULL_TOKENS, 0)
    assert texts.published.began == texts.clock.now - 10.0
