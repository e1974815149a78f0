from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.core.source_config import NgramConfig
from specserve.core.types import Draft, DraftBatch
from specserve.sources import ngram
from specserve.sources.ngram import NgramSource


def config(**options: object) -> NgramConfig:
    return NgramConfig.model_validate({"kind": "ngram", **options})


def batch(texts: dict[str, list[int]], limit: int = 128, width: int = 0) -> DraftBatch:
    counts = [len(text) for text in texts.values()]
    token_ids = np.full((len(texts), max([*counts, width])), -7, np.int32)
    for row, text in enumerate(texts.values()):
        token_ids[row, : len(text)] = text
    limits = np.full(len(texts), limit, np.int32)
    num_tokens = np.array(counts, np.int32)
    return DraftBatch(list(texts), token_ids, num_tokens, num_tokens, limits)


def propose(proposer: NgramSource, text: list[int], limit: int = 128) -> Draft:
    return proposer.propose(batch({"a": text}, limit))[0]


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
    assert propose(NgramSource(config(max_draft_len=2)), text) == Draft((10, 11), "ngram", 3)


def test_of_equal_matches_the_newest_is_taken_or_the_oldest_on_request() -> None:
    text = [1, 2, 30, 1, 2, 40, 1, 2]
    assert propose(NgramSource(config(max_draft_len=1)), text).tokens == (40,)
    oldest = NgramSource(config(max_draft_len=1, use_oldest=True))
    assert propose(oldest, text).tokens == (30,)


def test_a_match_shorter_than_the_minimum_is_no_match() -> None:
    text = [5, 1, 2, 9, 9, 1, 2]
    strict = NgramSource(config(min_matching_ngram_size=3))
    assert propose(strict, text).tokens == ()
    assert propose(NgramSource(config()), text).tokens != ()


def test_a_periodic_text_is_continued_with_its_period() -> None:
    proposer = NgramSource(config(max_draft_len=7))
    assert propose(proposer, [9, 1, 2, 3, 1, 2, 3]).tokens == (1, 2, 3, 1, 2, 3, 1)
    proposer.forget(["a"])
    assert propose(proposer, [8, 5, 5, 5]).tokens == (5,) * 7


def test_a_draft_never_runs_past_the_requests_limit() -> None:
    proposer = NgramSource(config(max_draft_len=8))
    for limit in (5, 1, 0):
        assert len(propose(proposer, [1, 2, 3] * 5, limit).tokens) == limit


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3]])
def test_a_text_too_short_to_repeat_gets_no_draft(text: list[int]) -> None:
    assert propose(NgramSource(config()), text).tokens == ()


def test_an_empty_batch_gets_no_drafts() -> None:
    nothing = np.zeros(0, np.int32)
    empty = DraftBatch([], np.zeros((0, 4), np.int32), nothing, nothing, nothing)
    assert NgramSource(config()).propose(empty) == []


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
    proposer = NgramSource(options)
    rng = random.Random(seed)
    known = dict.fromkeys(map(str, range(len(texts))), 0)
    while any(known[name] < len(texts[int(name)]) for name in known):
        # Some requests are absent from this step, and the others come in any order.
        present = rng.sample(list(known), rng.randint(1, len(known)))
        for name in present:
            known[name] = min(known[name] + rng.randint(0, 6), len(texts[int(name)]))
        limit = rng.randint(0, 10)
        step = {name: texts[int(name)][: known[name]] for name in present}
        for name, draft in zip(present, proposer.propose(batch(step, limit)), strict=True):
            tokens, size = naive(step[name], options, limit)
            assert (list(draft.tokens), draft.match_len) == (tokens, size)


def test_large_texts_of_many_tokens_agree_with_a_plain_search() -> None:
    rng = np.random.default_rng(0)
    options = config(max_draft_len=4)
    proposer = NgramSource(options)
    text = rng.integers(0, 60, 6000).tolist()
    for end in range(200, 6000, 290):
        draft = propose(proposer, text[:end])
        assert (list(draft.tokens), draft.match_len) == naive(text[:end], options, 4)


def test_requests_keep_their_text_when_they_change_rows() -> None:
    proposer = NgramSource(config(max_draft_len=2))
    one, two = [1, 2, 3, 4, 1, 2], [1, 2, 7, 8, 1, 2]
    proposer.propose(batch({"one": one[:-1], "two": two[:-1]}))
    swapped = proposer.propose(batch({"two": two, "one": one}))
    assert [draft.tokens for draft in swapped] == [(7, 8), (3, 4)]


def test_a_request_that_was_pre_empted_comes_back_to_its_index() -> None:
    proposer = NgramSource(config(max_draft_len=2))
    text = [1, 2, 3, 4, 5]
    proposer.propose(batch({"away": text, "here": text}))
    for _ in range(3):
        proposer.propose(batch({"here": text}))
    before = proposer.num_bytes
    [draft] = proposer.propose(batch({"away": [*text, 9, 2, 3]}))
    assert draft.tokens == (4, 5)
    assert proposer.num_bytes == before


def test_an_id_that_comes_back_with_a_shorter_text_starts_anew() -> None:
    proposer = NgramSource(config(max_draft_len=2))
    propose(proposer, [1, 2, 3, 4] * 20)
    assert propose(proposer, [1, 2, 8, 8, 1, 2]).tokens == (8, 8)


def test_other_tokens_under_a_known_id_never_make_a_wrong_match() -> None:
    proposer = NgramSource(config(max_draft_len=2))
    propose(proposer, [1, 2, 3, 4, 1, 2])
    assert propose(proposer, [6, 7, 8, 9, 10, 1, 2]).tokens == ()


def test_forgotten_requests_take_no_memory() -> None:
    proposer = NgramSource(config())
    assert proposer.num_bytes == 0
    names = [str(number) for number in range(200)]
    proposer.propose(batch({name: list(range(100)) for name in names}))
    assert proposer.num_bytes > 0
    proposer.forget([*names, "never seen"])
    assert proposer.num_bytes == 0


def test_memory_is_bounded_by_the_length_of_the_text() -> None:
    proposer = NgramSource(config(min_matching_ngram_size=2, max_matching_ngram_size=4))
    text = np.random.default_rng(0).integers(0, 4096, 20_000).tolist()
    for end in range(1000, 20_001, 1000):
        propose(proposer, text[:end])
    assert proposer.num_bytes <= 3 * 32 * len(text) * 2


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INGEST_TOKENS_PER_STEP", 1000)
    proposer = NgramSource(config(max_draft_len=1))
    rng = np.random.default_rng(0)
    prompt = [*rng.integers(100, 4000, 2500).tolist(), 7, 8, 9, *rng.integers(100, 4000, 100)]
    text = [*prompt, 7, 8]
    drafts = [propose(proposer, text).tokens for _ in range(4)]
    assert drafts[0] == ()
    assert drafts[-1] == (9,)


def test_a_long_prompt_does_not_starve_the_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INGEST_TOKENS_PER_STEP", 1000)
    proposer = NgramSource(config(max_draft_len=1))
    step = batch({"long": list(range(5000)), "short": [1, 2, 3, 4, 1, 2]})
    assert proposer.propose(step)[1].tokens == (3,)


def test_the_engines_arrays_are_left_as_they_are() -> None:
    step = batch({"a": [1, 2, 3, 1, 2], "b": [4, 4, 4]}, width=20)
    copies = [array.copy() for array in (step.token_ids, step.num_tokens, step.max_draft_tokens)]
    NgramSource(config()).propose(step)
    for array, copy in zip(
        (step.token_ids, step.num_tokens, step.max_draft_tokens), copies, strict=True
    ):
        np.testing.assert_array_equal(array, copy)


def test_a_view_into_a_wider_buffer_will_do() -> None:
    buffer = np.zeros((2, 64), np.int32)
    buffer[:, :5] = [[1, 2, 3, 1, 2], [5, 6, 7, 5, 6]]
    counts, limits = np.array([5, 5], np.int32), np.array([1, 1], np.int32)
    step = DraftBatch(["a", "b"], buffer[:, :8], counts, counts, limits)
    assert [draft.tokens for draft in NgramSource(config()).propose(step)] == [(3,), (7,)]
