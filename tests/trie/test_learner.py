from __future__ import annotations

import gc
from weakref import ref

import numpy as np
import pytest

from specserve.core.types import Int32Array
from specserve.trie import learner as module
from specserve.trie.branch import CLUSTER
from specserve.trie.layout import IS_OPEN
from specserve.trie.learner import ClusterLearner
from specserve.trie.memory import TrieMemory
from specserve.trie.namespaces import namespace, tenant_half
from specserve.trie.records import Record
from tests.trie.lookups import look_up

TEXT = np.random.default_rng(0).integers(0, 30_000, 2000).astype(np.int32)


@pytest.fixture
def memory() -> TrieMemory:
    return TrieMemory(8 << 20, ["n", "m"])


def piece(
    begin: int, end: int, sequence: str = "s", *, namespace: str = "n", final: bool = False
) -> Record:
    tokens = TEXT[begin:end].astype("<i4").tobytes()
    return Record("o", 1, 0.0, namespace, "text", sequence, begin, tokens, final)


def draft(memory: TrieMemory, context: Int32Array, namespace: str = "n") -> tuple[list[int], bool]:
    trie = memory.tries().get(namespace)
    assert trie is not None
    found = look_up(trie, [context], [4], floor=0.1)
    return found.tokens[0, : found.lengths[0]].tolist(), found.labels[0] == CLUSTER


def test_pieces_from_another_replica_become_one_text(memory: TrieMemory) -> None:
    learner = ClusterLearner(memory)
    for begin, end in ((0, 700), (700, 703), (703, 1000)):
        learner.apply(piece(begin, end, final=end == 1000))
    for end in (20, 699, 702, 900):
        assert draft(memory, TEXT[end - 10 : end]) == (TEXT[end : end + 4].tolist(), True)


def test_no_draft_crosses_a_missing_piece(memory: TrieMemory) -> None:
    learner = ClusterLearner(memory)
    learner.apply(piece(0, 100))
    learner.apply(piece(200, 300))
    assert draft(memory, TEXT[90:100])[0] == []
    assert draft(memory, TEXT[200:210])[0] == TEXT[210:214].tolist()


def test_no_draft_crosses_a_gap_in_a_text_that_was_closed(
    memory: TrieMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_TEXTS", 1)
    learner = ClusterLearner(memory)
    learner.apply(piece(0, 100))
    learner.apply(piece(500, 510, "another"))
    learner.apply(piece(200, 300))
    assert draft(memory, TEXT[90:100])[0] == []
    assert draft(memory, TEXT[200:210])[0] == TEXT[210:214].tolist()


def test_a_purge_clears_its_namespace(memory: TrieMemory) -> None:
    learner = ClusterLearner(memory)
    learner.apply(piece(0, 100))
    learner.apply(piece(400, 500, "other", namespace="m"))
    assert draft(memory, TEXT[40:50])[0]
    learner.apply(Record("o", 2, 0.0, "n", "purge"))
    assert draft(memory, TEXT[40:50])[0] == []
    assert draft(memory, TEXT[440:450], "m")[0]


def test_a_text_that_continues_after_a_purge_is_learned_from_there(memory: TrieMemory) -> None:
    learner = ClusterLearner(memory)
    learner.apply(piece(0, 100))
    learner.apply(Record("o", 2, 0.0, "n", "purge"))
    learner.apply(piece(100, 200))
    learner.apply(piece(200, 300))
    assert draft(memory, TEXT[80:90])[0] == []
    for end in (120, 199, 220):
        assert draft(memory, TEXT[end - 10 : end])[0] == TEXT[end : end + 4].tolist()


def test_text_of_an_unknown_namespace_is_ignored(memory: TrieMemory) -> None:
    learner = ClusterLearner(memory)
    for name in ("of another", "n", "m"):
        learner.apply(piece(0, 100, namespace=name))
    held = {name: trie.num_tokens for name, trie in memory.tries().items()}
    assert held == {"n": 100, "m": 100}


def test_a_purge_of_a_tenant_clears_all_its_namespaces() -> None:
    plain, adapter = namespace("m", tenant="a"), namespace("m", "sql", "a")
    other = namespace("m", tenant="b")
    memory = TrieMemory(8 << 20, [plain, other], 1)
    learner = ClusterLearner(memory)
    for name in (plain, adapter, other):
        learner.apply(piece(0, 100, namespace=name))
    learner.apply(Record("o", 2, 0.0, tenant_half("a"), "purge"))
    held = {name: trie.num_tokens for name, trie in memory.tries().items()}
    assert held == {plain: 0, adapter: 0, other: 100}


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_replaced_trie_is_freed_while_a_text_in_it_is_open(goes_on: bool) -> None:
    old, new = namespace("m", "old", "a"), namespace("m", "new", "a")
    memory = TrieMemory(8 << 20, [namespace("m", tenant="a")], 1)
    learner = ClusterLearner(memory)
    learner.apply(piece(0, 100, namespace=old))
    replaced = ref(memory.tries()[old])
    assert memory.for_request(new) is not None
    if goes_on:
        learner.apply(piece(100, 200, namespace=old))
        assert old not in learner._open
    gc.collect()
    assert replaced() is None


def test_the_oldest_of_too_many_open_texts_are_closed(
    memory: TrieMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_TEXTS", 8)
    learner = ClusterLearner(memory)
    for i in range(20):
        learner.apply(piece(0, 10, str(i)))
    trie = memory.tries().get("n")
    assert trie is not None
    assert int(trie._arrays.slots[:, IS_OPEN].sum()) == 8


def test_a_text_of_a_dead_replica_is_closed_after_a_timeout(memory: TrieMemory) -> None:
    now = [0.0]
    learner = ClusterLearner(memory, lambda: now[0])
    learner.apply(piece(0, 100, "cut off"))
    for now[0] in (300.0, 599.0, 601.0):
        learner.apply(piece(int(now[0]), int(now[0]) + 10, "alive"))
    trie = memory.tries().get("n")
    assert trie is not None
    assert int(trie._arrays.slots[:, IS_OPEN].sum()) == 1
    assert draft(memory, TEXT[90:96])[0] == TEXT[96:100].tolist()


def test_texts_that_never_end_leave_room_in_a_small_trie() -> None:
    memory = TrieMemory(1 << 18, ["n"])
    trie = memory.tries().get("n")
    assert trie is not None
    learner = ClusterLearner(memory)
    for number in range(500):  # as a new replica reads them from the log
        learner.apply(piece(number, number + 20, f"of a replica that died {number}"))
    assert int(trie._arrays.slots[:, IS_OPEN].sum()) <= trie.num_pages // 4
    for number in range(1500, 1600):
        learner.apply(piece(number, number + 20, str(number), final=True))
    assert draft(memory, TEXT[1599:1609])[0] == TEXT[1609:1613].tolist()
