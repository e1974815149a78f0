from __future__ import annotations

import random
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from specserve.core.source_config import MIN_TRIE_BYTES, TrieConfig
from specserve.core.types import Drafts, Int32Array
from specserve.trie.layout import NUM_FREE_PAGES, NUM_FREE_SLOTS, PAGE
from specserve.trie.token_trie import NO_SEQUENCE, TokenTrie
from tests.trie.lookups import look_up

SMALL = 1 << 20
LABELS = TrieConfig.LABELS


def tokens(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def noise(length: int, seed: int = 0, vocab_size: int = 30_000) -> Int32Array:
    return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.int32)


def learn(trie: TokenTrie, text: Int32Array, *, from_cluster: bool = False) -> None:
    sequence = trie.open(from_cluster=from_cluster)
    trie.append(sequence, text)
    trie.finish(sequence)


def look(
    trie: TokenTrie,
    context: Int32Array,
    limit: int = 8,
    own: int = NO_SEQUENCE,
    *,
    min_match_len: int = 2,
    floor: float = 0.0,
) -> Drafts:
    return look_up(trie, [context], [limit], [own], min_match_len=min_match_len, floor=floor)


def draft(
    trie: TokenTrie, context: Int32Array, limit: int = 8, own: int = NO_SEQUENCE
) -> list[int]:
    found = look(trie, context, limit, own)
    guess: list[int] = found.tokens[0, : found.lengths[0]].tolist()
    return guess


@pytest.fixture
def trie() -> TokenTrie:
    return TokenTrie(SMALL)


def test_drafts_continue_over_page_boundaries(trie: TokenTrie) -> None:
    text = noise(5 * PAGE)
    learn(trie, text)
    for end in (2, 3, 17, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 5, 4 * PAGE):
        assert draft(trie, text[max(end - 20, 0) : end]) == text[end : end + 8].tolist()
    assert draft(trie, text[-10:]) == []
    assert draft(trie, text[-14:-4]) == text[-4:].tolist()


def test_appending_in_pieces_gives_the_same_drafts_as_at_once() -> None:
    text = noise(1000, vocab_size=12)
    whole, pieces = TokenTrie(SMALL), TokenTrie(SMALL)
    learn(whole, text)
    a = pieces.open()
    cuts = [0, 1, 2, 3, 40, 63, 64, 65, 200, 201, 999, 1000]
    for begin, end in pairwise(cuts):
        pieces.append(a, text[begin:end])
    for end in range(2, 1000, 7):
        context = text[max(end - 30, 0) : end]
        assert draft(whole, context) == draft(pieces, context)


def test_every_draft_starts_with_a_seen_continuation(trie: TokenTrie) -> None:
    """Searches all texts for each draft's first token, after many evictions."""
    rng = random.Random(1)
    texts = [noise(rng.randrange(1, 900), i, vocab_size=6) for i in range(120)]
    for text in texts:
        learn(trie, text)
    assert trie.num_evicted_tokens > trie.num_tokens
    joined = [" ".join(map(str, ["", *text.tolist(), ""])) for text in texts]
    num_drafts = 0
    for seed in range(300):
        context = noise(12, 1000 + seed, vocab_size=6)
        found = look(trie, context)
        guess = found.tokens[0, : found.lengths[0]].tolist()
        if guess:
            num_drafts += 1
            seen = [*context[-2:].tolist(), guess[0]]
            assert any(f" {' '.join(map(str, seen))} " in text for text in joined)
    assert num_drafts > 200


def test_the_longest_match_wins_over_the_newest(trie: TokenTrie) -> None:
    learn(trie, tokens(1, 2, 3, 4, 5, 6, 7, 8, 70, 71))
    learn(trie, tokens(90, 91, 92, 93, 94, 95, 7, 8, 80, 81))
    found = look(trie, tokens(1, 2, 3, 4, 5, 6, 7, 8))
    assert found.tokens[0, : found.lengths[0]].tolist() == [70, 71]


def test_a_match_below_min_match_len_is_none(trie: TokenTrie) -> None:
    learn(trie, tokens(1, 2, 3, 4, 5, 6))
    assert look(trie, tokens(9, 2, 3, 4), min_match_len=3).lengths[0] == 2
    assert look(trie, tokens(9, 2, 3, 4), min_match_len=4).lengths[0] == 0


def test_a_draft_takes_the_likelier_branch_and_ends_below_the_floor(
    trie: TokenTrie,
) -> None:
    for i in range(6):
        learn(trie, tokens(1, 2, 3, 50, 60 + i, 7))
    learn(trie, tokens(1, 2, 3, 51, 9))
    found = look(trie, tokens(1, 2, 3), floor=0.3)
    assert found.tokens[0, : found.lengths[0]].tolist() == [50]
    assert 0.4 < found.confidence[0, 0] < 6 / 7
    assert look(trie, tokens(1, 2, 3), floor=0.01).lengths[0] == 3


def test_a_longer_match_gives_a_longer_draft(trie: TokenTrie) -> None:
    text = noise(64)
    learn(trie, text)
    found = [look(trie, text[20 - match : 20], 16, floor=0.1) for match in (2, 20)]
    lengths = [int(each.lengths[0]) for each in found]
    assert lengths[1] == 16
    assert 1 <= lengths[0] <= 4


def test_of_branches_with_equal_weight_the_newest_is_drafted(trie: TokenTrie) -> None:
    for last in (50, 51):
        learn(trie, tokens(1, 2, 3, last))
        assert draft(trie, tokens(1, 2, 3), 1) == [last]


def test_only_the_newest_places_count(trie: TokenTrie) -> None:
    for last in (50, 51):
        for _ in range(16):
            learn(trie, tokens(1, 2, 3, last))
        assert look(trie, tokens(1, 2, 3), 1, floor=0.8).tokens[0, 0] == last


def test_a_requests_own_text_weighs_most(trie: TokenTrie) -> None:
    for _ in range(5):
        learn(trie, tokens(1, 2, 3, 50))
    own = trie.open()
    trie.append(own, tokens(1, 2, 3, 51, 1, 2, 3))
    assert draft(trie, tokens(1, 2, 3, 51, 1, 2, 3), 1, own) == [51]
    assert draft(trie, tokens(1, 2, 3), 1) == [50]


def test_a_draft_is_labeled_by_origin(trie: TokenTrie) -> None:
    learn(trie, tokens(1, 2, 3))
    learn(trie, tokens(4, 5, 6), from_cluster=True)
    assert LABELS[look(trie, tokens(1, 2)).labels[0]].name == "trie_local"
    assert LABELS[look(trie, tokens(4, 5)).labels[0]].name == "trie_cluster"


def test_a_private_text_gives_drafts_only_to_its_own_open_request(
    trie: TokenTrie,
) -> None:
    secret = trie.open(private=True)
    trie.append(secret, tokens(1, 2, 3, 4, 5))
    assert draft(trie, tokens(1, 2, 3), own=secret) == [4, 5]
    assert draft(trie, tokens(1, 2, 3)) == []
    trie.finish(secret)
    assert trie.num_tokens == 0
    assert draft(trie, tokens(1, 2, 3), own=secret) == []


@pytest.mark.parametrize("private", [False, True])
def test_many_requests_at_the_same_place_all_get_drafts(trie: TokenTrie, private: bool) -> None:
    text = noise(40)
    learn(trie, text)
    sequences = [trie.open(private=private) for _ in range(64)]
    for sequence in sequences:
        trie.append(sequence, text[:20])
    found = look_up(trie, [text[:20]] * 64, [8] * 64, sequences)
    assert (found.tokens == text[20:28]).all()
    assert (found.lengths == 8).all()


def test_an_ended_private_text_leaves_nothing(trie: TokenTrie) -> None:
    text = noise(500)
    learn(trie, noise(200, 7))
    pages, slots = trie._arrays.scalars[[NUM_FREE_PAGES, NUM_FREE_SLOTS]].tolist()
    table = np.sort(trie._arrays.table, axis=None)
    secret = trie.open(private=True)
    trie.append(secret, text)
    assert trie.num_tokens == 700
    trie.finish(secret)
    assert trie.num_tokens == 200
    assert trie._arrays.scalars[[NUM_FREE_PAGES, NUM_FREE_SLOTS]].tolist() == [pages, slots]
    assert np.array_equal(np.sort(trie._arrays.table, axis=None), table)
    assert not any(draft(trie, text[end - 20 : end]) for end in range(20, 500, 11))


def test_an_ended_private_text_hides_no_other_text(trie: TokenTrie) -> None:
    context, follower = noise(16, 1), noise(8, 2)
    learn(trie, np.concatenate([context, follower]))
    table = np.sort(trie._arrays.table, axis=None)
    secret = trie.open(private=True)
    trie.append(secret, np.concatenate([context, noise(4, 3), context, noise(4, 4)]))
    trie.finish(secret)
    assert draft(trie, context) == follower.tolist()
    assert np.array_equal(np.sort(trie._arrays.table, axis=None), table)


def test_evicted_texts_leave_no_contexts_in_the_tables() -> None:
    trie = TokenTrie(SMALL)
    for seed in range(30):
        learn(trie, noise(trie.num_pages * PAGE // 2, seed, 1 << 30))
    assert trie._arrays.scalars[NUM_FREE_PAGES] < trie.num_pages // 20
    for level in trie._arrays.table:
        assert np.count_nonzero(level) <= trie.num_tokens  # no context stands there twice


def test_no_draft_crosses_dropped_tokens() -> None:
    trie = TokenTrie(SMALL)
    text = noise(4 * PAGE)
    a = trie.open()
    trie.append(a, text[:PAGE])
    others = [trie.open() for _ in range(trie.num_pages - 1)]
    for other in others:
        trie.append(other, tokens(1))
    num_tokens = trie.num_tokens
    trie.append(a, text[PAGE : 2 * PAGE])
    assert trie.num_tokens == num_tokens == PAGE + len(others)
    for other in others:
        trie.finish(other)
    trie.append(a, text[2 * PAGE :])
    assert draft(trie, text[PAGE - 20 : PAGE - 4]) == text[PAGE - 4 : PAGE].tolist()
    assert draft(trie, text[2 * PAGE : 2 * PAGE + 9])


def test_a_cleared_trie_is_empty_and_learns_again(trie: TokenTrie) -> None:
    text = noise(300)
    growing = trie.open()
    trie.append(growing, text)
    trie.clear()
    assert trie.num_tokens == 0
    trie.append(growing, text)
    assert trie.num_tokens == 0
    learn(trie, text)
    assert draft(trie, text[50:60]) == text[60:68].tolist()


def test_steps_run_while_a_trie_is_cleared(
    trie: TokenTrie, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(trie, old := noise(300))
    found, new = [], noise(300, 1)

    def step_between(_: float) -> None:
        found.append(draft(trie, old[50:60]))
        learn(trie, new)

    monkeypatch.setattr(time, "sleep", step_between)
    trie.clear()
    monkeypatch.undo()
    assert len(found) > 1
    assert not any(found)
    learn(trie, new)
    assert draft(trie, new[50:60]) == new[60:68].tolist()
    assert draft(trie, old[50:60]) == []


def test_memory_never_grows_and_used_texts_stay() -> None:
    trie = TokenTrie(SMALL)
    size = trie.num_bytes
    assert size <= SMALL
    used = noise(300, 1)
    learn(trie, used)
    for i in range(400):
        learn(trie, noise(300, 100 + i))
        for end in range(20, 300, 40):
            look(trie, used[end - 20 : end], 16)
    assert trie.num_bytes == size
    assert trie.num_tokens <= SMALL / 60
    assert trie.num_evicted_tokens == 401 * 300 - trie.num_tokens
    assert draft(trie, used[80:100]) == used[100:108].tolist()


def test_growing_texts_never_lose_their_end() -> None:
    trie = TokenTrie(SMALL)
    texts = [noise(600, i) for i in range(32)]
    sequences = [trie.open() for i in range(32)]
    for begin in range(0, 600, 5):
        for sequence, text in zip(sequences, texts, strict=True):
            trie.append(sequence, text[begin : begin + 5])
    for text in texts:
        assert draft(trie, text[580:595]) == text[595:].tolist()


def test_more_open_texts_than_pages_are_refused() -> None:
    trie = TokenTrie(SMALL)
    opened: list[int] = []
    while (sequence := trie.open()) != NO_SEQUENCE:
        trie.append(sequence, tokens(1, 2, 3))
        opened.append(sequence)
    assert len(opened) == trie.num_pages
    trie.append(opened[0], noise(PAGE))
    learned = trie.num_ingested_tokens
    assert learned == 3 * len(opened) + PAGE - 3
    for sequence in opened[1:]:
        trie.finish(sequence)
    trie.append(opened[0], noise(PAGE))
    assert trie.num_ingested_tokens == learned + PAGE
    assert trie.open() != NO_SEQUENCE


@pytest.mark.parametrize("how", ["finish", "clear"])
def test_the_number_of_an_ended_sequence_is_not_reused(trie: TokenTrie, how: str) -> None:
    """Another thread may end a sequence, and another text may get its slot."""
    former = trie.open(private=True)
    trie.append(former, noise(100))
    if how == "finish":
        trie.finish(former)
    else:
        trie.clear()
    text = noise(100, 2)
    trie.append(former, text)
    assert trie.num_tokens == 0
    current = trie.open()
    trie.append(former, text)
    trie.finish(former)
    assert trie.num_tokens == 0
    trie.append(current, text)
    assert trie.num_tokens == 100
    assert draft(trie, text[20:40], own=former) == text[40:48].tolist()


def test_one_call_looks_up_each_row_of_a_batch(trie: TokenTrie) -> None:
    text = noise(400)
    learn(trie, text)
    contexts = [text[:50], noise(50, 5), text[100:120], text[200:250]]
    found = look_up(trie, contexts, [8, 8, 4, 0])
    assert found.lengths.tolist() == [8, 0, 4, 0]
    assert found.tokens[0, :8].tolist() == text[50:58].tolist()
    assert found.tokens[2, :4].tolist() == text[120:124].tolist()


def test_a_lookup_beside_a_learning_thread_never_sees_half_a_text() -> None:
    trie = TokenTrie(SMALL)
    text = noise(2000, vocab_size=50)
    stop = threading.Event()
    errors: list[BaseException] = []

    def teach() -> None:
        try:
            for i in range(100_000):
                if stop.is_set():
                    return
                learn(trie, np.roll(text, i))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=teach)
    thread.start()
    try:
        pairs = {tuple(pair) for pair in pairwise(text.tolist())}
        pairs.add((int(text[-1]), int(text[0])))
        for begin in range(1500):
            guess = draft(trie, text[begin : begin + 8])
            chain = [int(text[begin + 7]), *guess]
            assert all(pair in pairs for pair in pairwise(chain))
    finally:
        stop.set()
        thread.join()
    assert not errors


def test_too_little_memory_is_refused_with_its_value() -> None:
    with pytest.raises(ValueError, match="max_bytes: 1000"):
        TokenTrie(1000)


def test_short_texts_evict_one_another() -> None:
    trie = TokenTrie(1 << 17)
    texts = [noise(20, seed) for seed in range(300)]
    for text in texts:
        learn(trie, text)
    assert draft(trie, texts[-1][:10]) == texts[-1][10:18].tolist()
    assert trie.num_evicted_tokens > 0


def test_the_configurations_least_memory_of_a_trie_is_enough() -> None:
    TokenTrie(MIN_TRIE_BYTES)
    with pytest.raises(ValueError, match="too small"):
        TokenTrie(MIN_TRIE_BYTES - 1)
