from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from specserve.core.metrics import LinkSnapshot
from specserve.trie.records import TextPiece
from specserve.trie.unsent import CHECK_S, FULL_TOKENS, MAX_DELAY_S, UnsentTexts

TEXT = np.random.default_rng(0).integers(0, 30_000, (2, 5000)).astype(np.int32)
PROMPT_TOKENS = 30


@dataclass
class Published:
    """What was told: (name, first token, number of tokens, of them prompt, final, stamp)."""

    pieces: list[tuple[str, int, int, int, bool, float]] = field(default_factory=list)

    def publish(self, piece: TextPiece) -> None:
        namespace, sequence, start, tokens, num_prompt_tokens, final, stamp = piece
        assert namespace == "tenant"
        assert tokens.tolist() == TEXT[int(sequence), start : start + len(tokens)].tolist()
        self.pieces.append((sequence, start, len(tokens), num_prompt_tokens, final, stamp))

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
        self.unsent = UnsentTexts(self.published, 4, self.clock)
        self.slots = np.array([3, 1])
        for name, slot in enumerate(self.slots.tolist()):
            self.unsent.open(slot, "tenant", str(name))
        self._ends = np.zeros(2, np.int64)

    def grow(self, *ends: int) -> list[tuple[str, int, int, int, bool, float]]:
        """One step; returns what is told in it."""
        begins, self._ends = self._ends, np.array(ends, np.int64)
        prompts, buffer = np.full(2, PROMPT_TOKENS, np.int32), TEXT.copy()
        batch = self.slots, buffer, self._ends.astype(np.int32), prompts
        return self.told(lambda: self.unsent.add(batch, begins, self._ends))

    def told(self, call: object) -> list[tuple[str, int, int, int, bool, float]]:
        self.published.pieces.clear()
        assert callable(call)
        call()
        return list(self.published.pieces)


@pytest.fixture
def texts() -> Texts:
    return Texts()


def test_little_waits_for_more_and_enough_does_not(texts: Texts) -> None:
    assert texts.grow(40, 50) == []
    assert texts.grow(FULL_TOKENS - 1, 55) == []
    assert texts.grow(FULL_TOKENS + 2, 60) == [
        ("0", 0, FULL_TOKENS + 2, PROMPT_TOKENS, False, 100.0)
    ]
    assert texts.grow(FULL_TOKENS + 5, 60) == []
    texts.clock.now += MAX_DELAY_S
    assert texts.grow(FULL_TOKENS + 7, 60) == [
        ("1", 0, 60, PROMPT_TOKENS, False, 100.0),
        ("0", FULL_TOKENS + 2, 5, 0, False, 100.0),
    ]
    texts.clock.now += CHECK_S
    assert texts.grow(FULL_TOKENS + 8, 60) == []


def test_a_long_prompt_is_told_at_once(texts: Texts) -> None:
    assert texts.grow(4000, 5) == [("0", 0, 4000, PROMPT_TOKENS, False, 100.0)]


def test_the_end_of_a_text_is_told_though_the_request_is_gone(texts: Texts) -> None:
    texts.grow(40, 20)
    texts.clock.now += 1.0
    assert texts.told(lambda: texts.unsent.close(3)) == [("0", 0, 40, PROMPT_TOKENS, True, 100.0)]
    assert texts.told(lambda: texts.unsent.close(3)) == []
    assert texts.told(lambda: texts.unsent.close(1)) == [("1", 0, 20, 20, True, 100.0)]


def test_a_text_whose_end_was_told_already_is_closed(texts: Texts) -> None:
    texts.grow(FULL_TOKENS, 0)
    assert texts.told(lambda: texts.unsent.close(3)) == [("0", FULL_TOKENS, 0, 0, True, 100.0)]


def test_what_waits_of_a_request_that_is_not_in_the_batch_is_told(texts: Texts) -> None:
    texts.grow(40, 20)
    texts.clock.now += MAX_DELAY_S
    nothing = np.zeros(0, np.int64)
    batch = nothing, TEXT[:0].copy(), nothing.astype(np.int32), nothing.astype(np.int32)
    told = texts.told(lambda: texts.unsent.add(batch, nothing, nothing))
    assert [each[:3] for each in told] == [("1", 0, 20), ("0", 0, 40)]


def test_a_text_that_is_not_shared_is_not_told(texts: Texts) -> None:
    texts.slots = np.array([0, 1])
    assert texts.grow(4000, 4000) == [("1", 0, 4000, PROMPT_TOKENS, False, 100.0)]
    assert texts.told(lambda: texts.unsent.close(0)) == []


def test_what_was_learned_in_a_step_that_failed_leaves_a_gap_without_others_text(
    texts: Texts,
) -> None:
    texts.unsent._tails.tokens[:] = 7  # of a former request
    texts.grow(20, 0)
    texts._ends = np.array([25, 0])  # learned, and not told of
    texts.grow(30, 0)
    assert texts.told(lambda: texts.unsent.close(3)) == [("0", 25, 5, 5, True, 100.0)]
