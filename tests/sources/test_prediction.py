from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.core.source_config import PredictionConfig
from specserve.core.types import RequestControls
from specserve.sources.base import SourceContext
from specserve.sources.prediction import NEARBY_TOKENS, PredictionSource, num_predicted
from tests.draft_batches import draft_batch, propose

PROMPT = [7, 8, 9]
FILE = list(range(100, 140))


def predicted(*texts: Sequence[int], **controls: object) -> RequestControls:
    tokens = np.concatenate([np.array(each, np.int32) for each in texts])
    return RequestControls(prediction=tokens.tobytes(), **controls)  # type: ignore[arg-type]


class Asked:
    """The source, called for one request at a time."""

    def __init__(self, max_draft_len: int = 4) -> None:
        config = PredictionConfig(kind="prediction", max_draft_len=max_draft_len)
        self.source = PredictionSource(config, SourceContext(num_slots=4))
        self.longest = max_draft_len
        self.confidence: list[float] = []

    def draft(self, output: Sequence[int], *, slot: int = 0, limit: int = 128) -> list[int]:
        """The source's draft after this output."""
        batch = draft_batch({slot: [*PROMPT, *output]}, num_prompt_tokens=len(PROMPT))
        found = propose(self.source, batch, np.array([min(limit, self.longest)], np.int32))
        length = int(found.lengths[0])
        self.confidence = found.confidence[0, :length].tolist()
        return list(found.tokens[0, :length].tolist())

    def close(self, slot: int) -> None:
        self.source.close(np.array([slot], np.int64))


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_the_draft_starts_at_the_predictions_beginning(asked: Asked) -> None:
    asked.source.open(0, predicted(FILE))
    assert asked.draft([]) == FILE[:4]
    assert asked.draft(FILE[:1]) == FILE[1:5]
    assert asked.draft(FILE[:6]) == FILE[6:10]


def test_confidence_grows_with_the_length_of_the_match(asked: Asked) -> None:
    asked.source.open(0, predicted(FILE))
    asked.draft(FILE[:1])
    first = asked.confidence
    asked.draft(FILE[:20])
    assert 0.5 < first[0] < first[-1] < asked.confidence[0] < 1


def test_a_draft_ends_at_the_limit_and_at_the_predictions_end(asked: Asked) -> None:
    asked.source.open(0, predicted(FILE))
    assert asked.draft(FILE[:3], limit=2) == FILE[3:5]
    assert asked.draft(FILE[:-2]) == FILE[-2:]
    assert asked.draft(FILE) == []


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([*FILE[:10], 1, 2, FILE[10]], FILE[11:15]),  # inserted
        ([*FILE[:10], FILE[15]], FILE[16:20]),  # left out
        ([*FILE[:10], 1, FILE[11]], FILE[12:16]),  # changed
        ([*FILE[30:], *FILE[:2]], FILE[2:6]),  # moved
    ],
)
def test_after_a_deviation_drafts_continue_from_the_next_match(
    asked: Asked, written: list[int], expected: list[int]
) -> None:
    asked.source.open(0, predicted(FILE))
    assert asked.draft(written) == expected


def test_without_a_match_there_is_no_draft(asked: Asked) -> None:
    asked.source.open(0, predicted(FILE))
    assert asked.draft([*FILE[:10], 1]) == []
    assert asked.draft([*FILE[:10], 1, 2]) == []


def test_the_nearest_match_after_the_last_certain_place_wins(asked: Asked) -> None:
    repeated = [1, 2, 3, 4, 5]
    places = [[*repeated, 10 * number] for number in range(2, 7)]
    asked.source.open(0, predicted(*places))
    written = [*places[0], *places[1]]
    assert asked.draft([*written, 99, *repeated[:3]], limit=3) == [4, 5, 40]
    # The first place is nearer in tokens, but lies before the last certain place.
    assert asked.draft([*written, 99, *repeated], limit=1) == [40]


def test_a_longer_match_wins_over_a_nearer_one(asked: Asked) -> None:
    asked.source.open(0, predicted([*FILE[:5], 1, 50, 51, 2, 1, 60, 61]))
    assert asked.draft([*FILE[:5], 2, 1], limit=1) == [60]


def test_a_match_of_one_token_counts_only_nearby(asked: Asked) -> None:
    far = [*range(1000, 1000 + NEARBY_TOKENS)]
    asked.source.open(0, predicted([*FILE[:5], *far, 1, 2, 3]))
    assert asked.draft([*FILE[:5], 1]) == []
    assert asked.draft([*FILE[:5], 1, 2], limit=1) == [3]


def test_a_match_may_be_in_any_of_several_predictions(asked: Asked) -> None:
    other = list(range(200, 220))
    asked.source.open(0, predicted(FILE, other))
    assert asked.draft(FILE[:2]) == FILE[2:6]
    asked.close(0)
    asked.source.open(0, predicted(FILE, other))
    assert asked.draft(other[:2]) == other[2:6]
    asked.close(0)
    asked.source.open(0, predicted(FILE, other))
    assert asked.draft(FILE) == other[:4]  # predictions are concatenated


def test_the_number_of_steps_does_not_change_the_draft(asked: Asked) -> None:
    answer = [*FILE[:10], 1, 2, *FILE[12:30], 3, *FILE[5:9]]
    for slot in (0, 1):
        asked.source.open(slot, predicted(FILE))
    for length in range(len(answer)):
        asked.draft(answer[:length], slot=0)
    assert asked.draft(answer, slot=0) == asked.draft(answer, slot=1) == FILE[9:13]


def test_each_request_has_its_own_prediction(asked: Asked) -> None:
    other = list(range(200, 220))
    asked.source.open(0, predicted(FILE))
    asked.source.open(1, RequestControls())
    asked.source.open(2, predicted(other, tenant="b"))
    batch = draft_batch(
        {2: [*PROMPT, 200], 0: [*PROMPT, 100], 1: [*PROMPT, 100]}, num_prompt_tokens=len(PROMPT)
    )
    found = propose(asked.source, batch, np.full(3, 2, np.int32))
    assert found.lengths.tolist() == [2, 2, 0]
    assert found.tokens[:2, :2].tolist() == [other[1:3], FILE[1:3]]


def num_kept(asked: Asked) -> int:
    """How many predictions take memory."""
    return sum(text is not None for text in asked.source._texts)


def test_a_slots_next_request_does_not_get_the_old_prediction(asked: Asked) -> None:
    asked.source.open(0, predicted(FILE))
    asked.draft(FILE[:5])
    assert num_kept(asked) == 1
    asked.close(0)
    assert num_kept(asked) == 0
    asked.source.open(0, RequestControls(tenant="b"))
    assert asked.draft(FILE[:5]) == []


@pytest.mark.parametrize("controls", [{"speculation": "off"}, {"max_draft_tokens": 0}])
def test_no_prediction_is_kept_for_a_request_without_drafts(
    asked: Asked, controls: dict[str, object]
) -> None:
    asked.source.open(0, predicted(FILE, **controls))
    assert num_kept(asked) == 0


def test_an_empty_batch_gets_no_drafts(asked: Asked) -> None:
    assert len(propose(asked.source, draft_batch({}), np.zeros(0, np.int32)).lengths) == 0


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(2, 8))
def test_every_draft_is_a_part_of_the_prediction(seed: int, alphabet: int) -> None:
    rng = random.Random(seed)
    text, written = (rng.choices(range(1, alphabet), k=rng.randint(1, 60)) for _ in range(2))
    asked = Asked()
    asked.source.open(0, predicted(text))
    for length in range(len(written) + 1):
        draft = asked.draft(written[:length])
        places = range(len(text) - len(draft) + 1)
        assert not draft or any(text[place : place + len(draft)] == draft for place in places)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (FILE, len(FILE)),
        (FILE[:7], 7),
        ([1, 2, 3], 0),
        ([], 0),
        # The first token after the deviation was not predicted.
        ([*FILE[:10], 1, *FILE[10:]], len(FILE) - 1),
    ],
)
def test_correctly_predicted_tokens_are_counted(answer: list[int], expected: int) -> None:
    assert num_predicted(np.array(FILE, np.int32), answer) == expected
