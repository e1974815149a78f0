from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.core.source_config import NgramConfig
from specserve.core.types import Drafts
from specserve.sources import ngram
from specserve.sources.ngram import NgramSource
from tests.draft_batches import draft_batch

NUM_SLOTS = 8


def source(num_slots: int = NUM_SLOTS, **options: object) -> NgramSource:
    return NgramSource(config(**options), num_slots)


def config(**options: object) -> NgramConfig:
    return NgramConfig.model_validate({"kind": "ngram", **options})


def propose_all(source: NgramSource, texts: dict[int, list[int]], limit: int = 128) -> Drafts:
    return source.propose(draft_batch(texts), np.full(len(texts), limit, np.int32))


def tokens(drafts: Drafts) -> list[list[int]]:
    rows = zip(drafts.tokens, drafts.lengths, strict=True)
    return [row[:length].tolist() for row, length in rows]


def propose(source: NgramSource, text: list[int], limit: int = 128) -> list[int]:
    (draft,) = tokens(propose_all(source, {3: text}, limit))
    return draft


def matched(drafts: Drafts) -> list[float]:
    """Tokens that each draft's first one was found by, as its confidence says."""
    rows = zip(drafts.confidence[:, 0].tolist(), drafts.lengths, strict=True)
    return [round((8 * sure / (1 - sure)) ** 0.5, 3) if length else 0 for sure, length in rows]


def naive(text: list[int], settings: NgramConfig, limit: int) -> tuple[list[int], int]:
    """The definition: longest suffix first, its newest or oldest place, copied cyclically."""
    limit = min(limit, settings.max_draft_len)
    sizes = range(settings.max_matching_ngram_size, settings.min_matching_ngram_size - 1, -1)
    for size in sizes:
        if size >= len(text) or not limit:
            continue
        ends = range(size, len(text))
        places = [end for end in ends if text[end - size : end] == text[-size:]]
        if places:
            place = places[0] if settings.use_oldest else places[-1]
            longer = list(text)
            for offset in range(limit):
                longer.append(longer[place + offset])
            return longer[len(text) :], size
    return [], 0


def test_what_followed_the_longest_match_is_the_draft() -> None:
    text = [1, 2, 3, 10, 11, 2, 3, 20, 21, 9, 1, 2, 3]
    drafts = propose_all(source(max_draft_len=2), {0: text})
    assert (tokens(drafts), matched(drafts)) == ([[10, 11]], [3])


def test_of_equal_matches_the_newest_is_taken_or_the_oldest_on_request() -> None:
    text = [1, 2, 30, 1, 2, 40, 1, 2]
    assert propose(source(max_draft_len=1), text) == [40]
    assert propose(source(max_draft_len=1, use_oldest=True), text) == [30]


def test_a_match_shorter_than_the_minimum_is_no_match() -> None:
    text = [5, 1, 2, 9, 9, 1, 2]
    assert propose(source(min_matching_ngram_size=3), text) == []
    assert propose(source(), text) != []


def test_a_periodic_text_is_continued_with_its_period() -> None:
    looking = source(max_draft_len=7)
    assert propose(looking, [9, 1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1]
    looking.close(np.array([3]))
    assert propose(looking, [8, 5, 5, 5]) == [5] * 7


def test_the_further_a_draft_goes_the_surer_it_is() -> None:
    confidence = propose_all(source(max_draft_len=4), {0: [1, 2, 3, 4, 5, 6, 1, 2]}).confidence[0]
    assert (np.diff(confidence) > 0).all()
    assert 0 < confidence[0] < confidence[-1] < 1


def test_a_draft_never_runs_past_the_requests_limit() -> None:
    looking = source(max_draft_len=8)
    for limit, length in ((100, 8), (5, 5), (1, 1), (0, 0)):
        assert len(propose(looking, [1, 2, 3] * 5, limit)) == length


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3]])
@pytest.mark.parametrize("smallest", [1, 2])
def test_a_text_too_short_to_repeat_gets_no_draft(text: list[int], smallest: int) -> None:
    assert propose(source(min_matching_ngram_size=smallest), text) == []


def test_an_empty_batch_gets_no_drafts() -> None:
    assert tokens(propose_all(source(), {})) == []


@settings(deadline=None, max_examples=150)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    max_draft_len=st.integers(1, 9),
    use_oldest=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_step_agrees_with_a_plain_search(
    texts: list[list[int]], sizes: list[int], max_draft_len: int, use_oldest: bool, seed: int
) -> None:
    options = config(
        min_matching_ngram_size=sizes[0],
        max_matching_ngram_size=sizes[1],
        max_draft_len=max_draft_len,
        use_oldest=use_oldest,
    )
    looking, rng = NgramSource(options, 4), random.Random(seed)
    known = dict.fromkeys(range(len(texts)), 0)
    while any(known[slot] < len(texts[slot]) for slot in known):
        # Some requests are absent from this step, and the others come in any order.
        present = rng.sample(list(known), rng.randint(1, len(known)))
        for slot in present:
            known[slot] = min(known[slot] + rng.randint(0, 6), len(texts[slot]))
        limit = rng.randint(0, 10)
        step = {slot: texts[slot][: known[slot]] for slot in present}
        drafts = propose_all(looking, step, limit)
        expected = [naive(text, options, limit) for text in step.values()]
        assert list(zip(tokens(drafts), matched(drafts), strict=True)) == expected


def test_large_texts_of_many_tokens_agree_with_a_plain_search() -> None:
    options = config(max_draft_len=4)
    looking = NgramSource(options, 1)
    text = np.random.default_rng(0).integers(0, 60, 6000).tolist()
    for end in range(200, 6000, 290):
        drafts = propose_all(looking, {0: text[:end]})
        assert (tokens(drafts)[0], matched(drafts)[0]) == naive(text[:end], options, 4)


def test_a_request_that_was_pre_empted_comes_back_to_its_index_on_any_row() -> None:
    looking = source(max_draft_len=2)
    away, here = [1, 2, 3, 4, 5], [1, 2, 7, 8]
    propose_all(looking, {0: away, 5: here})
    for _ in range(3):
        propose_all(looking, {5: here})
    before = looking.num_bytes
    drafts = propose_all(looking, {5: [*here, 1, 2], 0: [*away, 9, 2, 3]})
    assert tokens(drafts) == [[7, 8], [4, 5]]
    assert looking.num_bytes == before


def test_a_slot_with_a_shorter_text_starts_anew() -> None:
    looking = source(max_draft_len=2)
    propose(looking, [1, 2, 3, 4] * 20)
    assert propose(looking, [1, 2, 8, 8, 1, 2]) == [8, 8]


def test_other_tokens_in_a_known_slot_never_make_a_wrong_match() -> None:
    looking = source(max_draft_len=2)
    propose(looking, [1, 2, 3, 4, 1, 2])
    assert propose(looking, [6, 7, 8, 9, 10, 1, 2]) == []


def test_a_closed_slot_takes_no_memory_and_the_next_request_sees_nothing_of_the_last() -> None:
    looking = source(200)
    assert looking.num_bytes == 0
    propose_all(looking, {slot: list(range(100)) for slot in range(200)})
    assert looking.num_bytes > 0
    looking.close(np.arange(200))
    assert looking.num_bytes == 0
    assert propose_all(looking, {7: [*range(100, 150), 3, 4]}).lengths[0] == 0


def test_memory_is_bounded_by_the_length_of_the_text() -> None:
    looking = source(min_matching_ngram_size=2, max_matching_ngram_size=4)
    text = np.random.default_rng(0).integers(0, 4096, 20_000).tolist()
    for end in range(1000, 20_001, 1000):
        propose(looking, text[:end])
    assert looking.num_bytes <= 3 * 32 * len(text) * 2


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INGEST_TOKENS_PER_STEP", 1000)
    looking, rng = source(max_draft_len=1), np.random.default_rng(0)
    prompt = [*rng.integers(100, 4000, 2500).tolist(), 7, 8, 9, *rng.integers(100, 4000, 100)]
    drafts = [propose(looking, [*prompt, 7, 8]) for _ in range(4)]
    assert drafts[0] == []
    assert drafts[-1] == [9]
    assert not looking.num_unindexed_tokens(draft_batch({3: [*prompt, 7, 8]}))


def test_a_long_prompt_does_not_starve_the_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INGEST_TOKENS_PER_STEP", 1000)
    drafts = propose_all(source(max_draft_len=1), {0: list(range(5000)), 1: [1, 2, 3, 4, 1, 2]})
    assert tokens(drafts)[1] == [3]


def test_the_engines_arrays_are_left_as_they_are() -> None:
    step = draft_batch({0: [1, 2, 3, 1, 2], 1: [4, 4, 4]}, width=20)
    limits = np.array([9, 9], np.int32)
    for array in (*step[:4], limits):
        array.setflags(write=False)  # type: ignore[union-attr]
    before = step.token_ids.copy()
    assert tokens(source(max_draft_len=2).propose(step, limits)) == [[3, 1], [4, 4]]
    np.testing.assert_array_equal(step.token_ids, before)


def test_a_view_into_a_wider_buffer_will_do() -> None:
    step = draft_batch({0: [1, 2, 3, 1, 2], 1: [5, 6, 7, 5, 6]}, width=64)
    step = step._replace(token_ids=step.token_ids[:, :8])
    assert tokens(source().propose(step, np.ones(2, np.int32))) == [[3], [7]]
