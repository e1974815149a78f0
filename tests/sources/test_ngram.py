from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.core.source_config import NgramConfig
from specserve.core.types import DraftBatch, RequestControls
from specserve.sources import ngram
from specserve.sources.base import SourceContext
from specserve.sources.ngram import MAX_VOTES, MIN_CONFIDENCE, NgramSource
from tests.draft_batches import propose

NUM_SLOTS = 256


def config(**options: object) -> NgramConfig:
    return NgramConfig.model_validate({"kind": "ngram", **options})


class Lookup:
    """An n-gram source with a slot for each name."""

    def __init__(self, options: NgramConfig) -> None:
        self.source = NgramSource(options, SourceContext(num_slots=NUM_SLOTS))
        self.longest = options.max_draft_len
        self.slots: dict[str, int] = {}
        self.confidence: list[float] = []

    def propose(self, texts: dict[str, list[int]], limit: int = 128) -> list[tuple[int, ...]]:
        """The drafts of a step with these requests."""
        step = self.batch(texts)
        propose(self.source, step, np.zeros(len(texts), np.int32))  # only indexes
        found = propose(self.source, step, np.full(len(texts), min(limit, self.longest), np.int32))
        pairs = list(zip(found.tokens.tolist(), found.lengths.tolist(), strict=True))
        if pairs:
            self.confidence = found.confidence[0, : pairs[0][1]].tolist()
        return [tuple(tokens[:length]) for tokens, length in pairs]

    def one(self, text: list[int], limit: int = 128) -> tuple[int, ...]:
        """The draft of a step with one request."""
        return self.propose({"a": text}, limit)[0]

    def batch(self, texts: dict[str, list[int]], width: int = 0) -> DraftBatch:
        for name in texts:
            self.slots.setdefault(name, len(self.slots))
        counts = np.array([len(text) for text in texts.values()], np.int32)
        token_ids = np.full((len(texts), max([*counts, width, 1])), -7, np.int32)
        for row, text in enumerate(texts.values()):
            token_ids[row, : len(text)] = text
        slots = np.array([self.slots[name] for name in texts], np.int64)
        return DraftBatch(slots, token_ids, counts, counts)

    def close(self, *names: str) -> None:
        """Closes these requests."""
        self.source.close(np.array([self.slots[name] for name in names], np.int64))


class Votes:
    """Reference: counts which token followed each n-gram, in a plain dictionary."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._entries: dict[tuple[int, ...], tuple[int, int, int]] = {}
        self._num_learned = 0

    def learn(self, text: Sequence[int]) -> None:
        """Learns the tokens of a text that grows from call to call."""
        for end in range(self._num_learned, len(text)):
            for size in self._sizes:
                if size <= end:
                    self._vote(tuple(text[end - size : end]), text[end])
        self._num_learned = len(text)

    def draft(self, text: Sequence[int], limit: int) -> tuple[list[int], list[float]]:
        """A draft after a text, with its confidence."""
        longer, confidence = list(text), list[float]()
        while len(confidence) < limit:
            known = [size for size in self._sizes if size <= len(longer)]
            known = [size for size in known if tuple(longer[-size:]) in self._entries]
            if not known:
                break
            token, hits, misses = self._entries[tuple(longer[-known[-1] :])]
            confidence.append(hits / (hits + misses + 1 / known[-1]))
            if np.prod(confidence) < MIN_CONFIDENCE:
                confidence.pop()
                break
            longer.append(token)
        return longer[len(text) :], confidence

    def _vote(self, context: tuple[int, ...], token: int) -> None:
        known, hits, misses = self._entries.get(context, (token, 0, 0))
        if known == token:
            hits += 1
        elif misses < hits:
            misses += 1
        else:
            known, hits, misses = token, 1, hits
        if hits + misses > MAX_VOTES:
            hits, misses = (hits + 1) // 2, misses // 2
        self._entries[context] = known, hits, misses


def test_the_draft_is_what_followed_the_longest_match() -> None:
    text = [3, 4, 20, 21, 9, 1, 2, 3, 4, 10, 11, 9, 1, 2, 3, 4]
    lookup = Lookup(config(max_draft_len=2))
    assert lookup.one(text) == (10, 11)
    assert lookup.confidence == pytest.approx([1 / (1 + 1 / 4)] * 2)  # one place of four tokens


def test_the_token_that_followed_most_often_is_drafted() -> None:
    text = [1, 30, 2, 1, 30, 3, 1, 40, 5, 1]
    lookup = Lookup(config(max_draft_len=1))
    assert lookup.one(text) == (30,)
    assert lookup.confidence == pytest.approx([2 / (2 + 1 + 1)])  # two places of three, one token


def test_of_equally_frequent_tokens_the_one_that_came_first_is_drafted() -> None:
    assert Lookup(config(max_draft_len=1)).one([1, 30, 2, 1, 40, 3, 1]) == (30,)


def test_a_token_that_follows_lately_replaces_one_that_followed_often() -> None:
    lookup = Lookup(config(max_draft_len=1, max_matching_ngram_size=1))
    text = [1, 30] * 100
    assert lookup.one([*text, 1]) == (30,)
    assert lookup.one([*text, *[1, 40] * MAX_VOTES, 1]) == (40,)


def test_the_sizes_of_ngrams_double_up_to_the_longest() -> None:
    text = [3, 4, 5, 6, 7, 60, 1, 2, 3, 4, 5, 6, 7, 50, 1, 2, 3, 4, 5, 6, 7]
    for longest, token in ((4, 60), (5, 60), (7, 50), (16, 60)):
        assert Lookup(config(max_matching_ngram_size=longest, max_draft_len=1)).one(text) == (
            token,
        )
    assert ngram._sizes(1, 8).tolist() == [1, 2, 4, 8]
    assert ngram._sizes(2, 5).tolist() == [2, 4, 5]
    assert ngram._sizes(3, 3).tolist() == [3]


def test_a_match_shorter_than_the_minimum_is_no_match() -> None:
    text = [5, 1, 2, 9, 9, 1, 2]
    strict = Lookup(config(min_matching_ngram_size=3))
    assert strict.one(text) == ()
    assert Lookup(config()).one(text) != ()


def test_a_draft_ends_where_it_is_improbable() -> None:
    text = [7, 1, 8, 2, 8, 3, 8, 4, 8, 5, 8, 6, 8, 9, 8]  # what follows 8 is always another token
    lookup = Lookup(config(max_draft_len=16, max_matching_ngram_size=1))
    draft = lookup.one(text)
    assert 0 < len(draft) < 16
    assert np.prod(lookup.confidence) >= MIN_CONFIDENCE


def test_a_periodic_text_is_continued_with_its_period() -> None:
    proposer = Lookup(config(max_draft_len=7))
    assert proposer.one([9, 1, 2, 3, 1, 2, 3, 1, 2, 3]) == (1, 2, 3, 1, 2, 3, 1)
    proposer.close("a")
    assert proposer.one([8, *[5] * 6]) == (5,) * 7


def test_a_draft_never_runs_past_the_requests_limit() -> None:
    proposer = Lookup(config(max_draft_len=8))
    for limit in (5, 1, 0):
        assert len(proposer.one([1, 2, 3] * 5, limit)) == limit


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3]])
def test_a_text_too_short_to_repeat_gets_no_draft(text: list[int]) -> None:
    assert Lookup(config()).one(text) == ()


def test_an_empty_batch_gets_no_drafts() -> None:
    assert Lookup(config()).propose({}) == []


@settings(max_examples=150)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), max_size=60), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    max_draft_len=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_every_step_agrees_with_plain_counts(
    texts: list[list[int]], sizes: list[int], max_draft_len: int, seed: int
) -> None:
    options = config(
        min_matching_ngram_size=sizes[0],
        max_matching_ngram_size=sizes[1],
        max_draft_len=max_draft_len,
    )
    proposer = Lookup(options)
    rng = random.Random(seed)
    known = dict.fromkeys(map(str, range(len(texts))), 0)
    votes = {name: Votes(ngram._sizes(*sizes).tolist()) for name in known}
    while any(known[name] < len(texts[int(name)]) for name in known):
        # A step has some of the requests, in any order.
        present = rng.sample(list(known), rng.randint(1, len(known)))
        for name in present:
            known[name] = min(known[name] + rng.randint(0, 6), len(texts[int(name)]))
        limit = rng.randint(0, 10)
        step = {name: texts[int(name)][: known[name]] for name in present}
        for name, draft in zip(present, proposer.propose(step, limit), strict=True):
            votes[name].learn(step[name])
            expected = votes[name].draft(step[name], min(limit, max_draft_len))
            assert list(draft) == expected[0]
            if name == present[0]:
                assert proposer.confidence == pytest.approx(expected[1])


def test_large_texts_of_many_tokens_agree_with_plain_counts() -> None:
    rng = np.random.default_rng(0)
    proposer, votes = Lookup(config(max_draft_len=4)), Votes((1, 2, 4))
    text = rng.integers(0, 60, 6000).tolist()
    for end in range(200, 6000, 290):
        votes.learn(text[:end])
        tokens, confidence = votes.draft(text[:end], 4)
        assert list(proposer.one(text[:end])) == tokens
        assert proposer.confidence == pytest.approx(confidence)


def test_requests_keep_their_index_when_they_change_rows() -> None:
    proposer = Lookup(config(max_draft_len=2))
    one, two = [1, 2, 3, 4, 1, 2], [1, 2, 7, 8, 1, 2]
    proposer.propose({"one": one[:-1], "two": two[:-1]})
    swapped = proposer.propose({"two": two, "one": one})
    assert swapped == [(7, 8), (3, 4)]


def test_a_preempted_request_comes_back_to_its_index() -> None:
    proposer = Lookup(config(max_draft_len=2))
    text = [1, 2, 3, 4, 5]
    proposer.propose({"away": text, "here": text})
    for _ in range(3):
        proposer.propose({"here": text})
    table = proposer.source._tables[proposer.slots["away"]]
    assert proposer.propose({"away": [*text, 9, 2, 3]}) == [(4, 5)]
    assert proposer.source._tables[proposer.slots["away"]] is table


def test_a_slot_with_a_shorter_text_is_indexed_again() -> None:
    proposer = Lookup(config(max_draft_len=2))
    proposer.one([1, 2, 3, 4] * 20)
    assert proposer.one([1, 2, 8, 8, 1, 2]) == (8, 8)


def num_bytes(proposer: Lookup) -> int:
    """Memory of all indexes."""
    return sum(table.nbytes for table in proposer.source._tables if table is not None)


def test_closed_requests_take_no_memory() -> None:
    proposer = Lookup(config())
    assert num_bytes(proposer) == 0
    names = [str(number) for number in range(200)]
    proposer.propose({name: list(range(100)) for name in names})
    assert num_bytes(proposer) > 0
    proposer.close(*names)
    assert num_bytes(proposer) == 0


def test_a_request_without_these_drafts_is_not_indexed() -> None:
    proposer, text = Lookup(config()), [1, 2, 3, 4] * 20
    for controls in (RequestControls(speculation="trie"), RequestControls(max_draft_tokens=0)):
        proposer.source.open(0, controls)
        assert proposer.propose({"a": text}, limit=0) == [()]
        assert num_bytes(proposer) == 0
        proposer.close("a")
    proposer.source.open(0, RequestControls())
    assert proposer.one(text)


def test_nobody_can_know_where_an_n_gram_lies_in_the_table() -> None:
    seeds = {int(Lookup(config()).source._options[2]) for _ in range(3)}
    assert len(seeds) == 3


def test_memory_is_bounded_by_the_length_of_the_text() -> None:
    proposer = Lookup(config(min_matching_ngram_size=2, max_matching_ngram_size=4))
    text = np.random.default_rng(0).integers(0, 4096, 20_000).tolist()
    for end in range(1000, 20_001, 1000):
        proposer.one(text[:end])
    assert num_bytes(proposer) <= 2 * 32 * len(text)  # sizes 2 and 4


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INGEST_TOKENS_PER_STEP", 1000)
    proposer = Lookup(config(max_draft_len=1))
    rng = np.random.default_rng(0)
    prompt = [*rng.integers(100, 4000, 2500).tolist(), 7, 8, 9, *rng.integers(100, 4000, 100)]
    text = [*prompt, 7, 8]
    drafts = [proposer.one(text) for _ in range(4)]
    assert drafts[0] == ()
    assert drafts[-1] == (9,)


def test_a_long_prompt_does_not_starve_the_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "INGEST_TOKENS_PER_STEP", 1000)
    proposer = Lookup(config(max_draft_len=1))
    step = {"long": list(range(5000)), "short": [1, 2, 3, 4, 1, 2]}
    assert proposer.propose(step)[1] == (3,)


def test_a_text_without_budget_in_its_first_step_gets_no_draft_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram, "INGEST_TOKENS_PER_STEP", 1000)
    proposer = Lookup(config(max_draft_len=1))
    step = {"first": list(range(3000)), "second": [1, 2, 3] * 200}
    assert proposer.propose(step)[1] == ()  # the first text took the budget of both calls
    assert proposer.propose(step)[1] == (1,)


def test_the_engines_arrays_are_not_changed() -> None:
    lookup = Lookup(config())
    step = lookup.batch({"a": [1, 2, 3, 1, 2], "b": [4, 4, 4]}, width=20)
    copies = [array.copy() for array in step[:4]]
    propose(lookup.source, step, np.array([8, 8], np.int32))
    for array, copy in zip(step[:4], copies, strict=True):
        np.testing.assert_array_equal(array, copy)
