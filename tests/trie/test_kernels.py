"""Which code is compiled: all of it before the first request, and nothing afterwards."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from specserve.core.source_config import NgramConfig, TrieConfig
from specserve.core.types import DraftBatch, Int32Array, RequestControls
from specserve.sources import ngram
from specserve.sources.base import SourceContext
from specserve.sources.ngram import NgramSource
from specserve.sources.trie import TrieSource
from specserve.trie import branch, contexts, pages
from specserve.trie.learner import ClusterLearner
from specserve.trie.namespaces import namespace
from specserve.trie.records import Record
from specserve.trie.token_trie import TokenTrie

NAMESPACE = namespace("m")


def compiled() -> dict[str, int]:
    """How many signatures each compiled function has, by its name."""
    return {
        f"{module.__name__}.{name}": len(value.signatures)
        for module in (branch, contexts, pages, ngram)
        for name, value in vars(module).items()
        if isinstance(value, Dispatcher)
    }


def text(length: int, seed: int = 0) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 30_000, length).astype(np.int32)


def batch(*texts: Int32Array, names: list[str], private: bool = False) -> DraftBatch:
    lengths = np.array([len(each) for each in texts], np.int32)
    rows = np.zeros((len(texts), lengths.max() + 8), np.int32)
    for row, each in zip(rows, texts, strict=True):
        row[: len(each)] = each
    controls = tuple(RequestControls(learn=not private) for _ in texts)
    view = rows[:, : lengths.max()]  # no contiguous array, as the engine's is none
    return DraftBatch(names, view, lengths, lengths // 2, np.full_like(lengths, 8), controls)


def from_another_replica(number: int, tokens: Int32Array, **fields: object) -> Record:
    record = Record("other", number, 0.0, NAMESPACE, sequence=f"text {number}")
    record = msgspec.structs.replace(record, tokens=tokens.astype("<i4").tobytes(), **fields)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Record)


@pytest.fixture
def proposer() -> TrieSource:
    return TrieSource.build(
        TrieConfig(kind="trie", max_bytes=1 << 20), SourceContext(model_identity="m")
    )


def test_traffic_of_no_kind_compiles_anything_anew(proposer: TrieSource) -> None:
    lookup = NgramSource(NgramConfig(kind="ngram"))
    before = compiled()
    kernels = ("branch.lookup", "pages.append", "pages.remove", "step_batch", "rehash")
    assert {before[each] for each in before if each.endswith(kernels)} == {1}

    for source in (proposer, lookup):
        source.propose(batch(text(200), names=["one"]))
        source.propose(batch(text(201), text(5000, 1), names=["one", "two"]))
        source.propose(batch(text(90, 2), names=["private"], private=True))
        source.forget(["one", "two", "private"])
        frozen = batch(text(90, 3), names=["frozen"])
        for array in (frozen.token_ids, frozen.num_tokens, frozen.max_draft_tokens):
            array.setflags(write=False)
        source.propose(frozen)

    learner = ClusterLearner(proposer._memory)
    for number in range(1, 40):  # until the oldest are evicted
        learner.apply(from_another_replica(number, text(3000, number), final=number % 2 == 0))
    trie = proposer._memory.of(NAMESPACE)
    assert trie is not None
    assert trie.num_evicted_tokens
    proposer.propose(batch(text(100, 38), names=["asks another's"]))
    learner.apply(from_another_replica(50, text(0), kind="remove", sequence="text 39"))
    proposer.snapshot()
    learner.apply(from_another_replica(51, text(0), kind="purge", sequence=""))
    proposer.propose(batch(text(100, 38), text(40), names=["three", "four"]))
    assert compiled() == before


@pytest.mark.parametrize("dtype", ["<i4", np.int64])
def test_tokens_may_come_in_any_array(proposer: TrieSource, dtype: str) -> None:
    before = compiled()
    trie = TokenTrie(1 << 20)
    content = text(100).astype(dtype).tobytes()
    unaligned = np.frombuffer(b"x" + content, dtype, offset=1)
    for number, tokens in enumerate((np.frombuffer(content, dtype), unaligned, unaligned[::2])):
        assert trie.open(str(number))
        assert trie.append(str(number), tokens) == 0
        found = trie.lookup(tokens[None, :40], tokens[:1] * 0 + 40, tokens[:1] * 0 + 8, ["asks"])
        assert found.tokens[0].tolist() == tokens[40:48].tolist()
        assert trie.remove(str(number)) == len(tokens)
    assert compiled() == before
