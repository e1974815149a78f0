"""All kernels are compiled before the first request."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from specserve.core.metrics import LinkSnapshot
from specserve.core.source_config import TrieConfig
from specserve.core.types import DraftBatch, Int32Array, RequestControls
from specserve.sources.base import SourceContext
from specserve.sources.trie import TrieSource
from specserve.trie import branch, contexts, pages, step, unsent
from specserve.trie.learner import ClusterLearner
from specserve.trie.memory import TrieMemory
from specserve.trie.namespaces import namespace
from specserve.trie.records import Record, TextPiece
from specserve.trie.token_trie import TokenTrie
from tests.draft_batches import propose
from tests.trie.lookups import look_up

NAMESPACE = namespace("m")
CONFIG = TrieConfig(kind="trie", max_bytes=1 << 20)


class Nowhere:
    """A link without other replicas."""

    def publish(self, piece: TextPiece) -> None:
        pass

    def link(self) -> LinkSnapshot:
        return LinkSnapshot(True, 0.0, 0, 0)


def compiled() -> dict[str, int]:
    """Number of signatures of each compiled function, by name."""
    return {
        f"{module.__name__}.{name}": len(value.signatures)
        for module in (branch, contexts, pages, step, unsent)
        for name, value in vars(module).items()
        if isinstance(value, Dispatcher)
    }


def text(length: int, seed: int = 0) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 30_000, length).astype(np.int32)


def batch(*texts: Int32Array, slots: list[int]) -> DraftBatch:
    lengths = np.array([len(each) for each in texts], np.int32)
    rows = np.zeros((len(texts), lengths.max() + 8), np.int32)
    for row, each in zip(rows, texts, strict=True):
        row[: len(each)] = each
    return DraftBatch(np.array(slots), rows, lengths, lengths // 2)


def limits(size: int) -> Int32Array:
    return np.full(size, 8, np.int32)


def from_another_replica(number: int, tokens: Int32Array, **fields: object) -> Record:
    record = Record("other", number, 0.0, NAMESPACE, sequence=f"text {number}")
    record = msgspec.structs.replace(record, tokens=tokens.astype("<i4").tobytes(), **fields)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Record)


@pytest.fixture
def source() -> TrieSource:
    memory = TrieMemory(CONFIG.max_bytes, [NAMESPACE])
    return TrieSource(CONFIG, memory, SourceContext(model_identity="m"), Nowhere())


def test_no_request_or_record_compiles_a_kernel(source: TrieSource) -> None:
    before = compiled()
    kernels = ("step.step", "pages.append_one", "pages.remove", "unsent.collect")
    assert {before[each] for each in before if each.endswith(kernels)} == {1}

    for slot in range(8):
        source.open(slot, RequestControls(learn=slot != 2))
    propose(source, batch(text(200), slots=[0]), limits(1))
    propose(source, batch(text(201), text(5000, 1), slots=[0, 1]), limits(2))
    propose(source, batch(text(90, 2), slots=[2]), limits(1))
    source.close(np.array([0, 1, 2]))

    learner = ClusterLearner(source._memory)
    for number in range(1, 40):  # until the oldest are evicted
        learner.apply(from_another_replica(number, text(3000, number), final=number % 2 == 0))
    trie = source._memory.tries().get(NAMESPACE)
    assert trie is not None
    assert trie.num_evicted_tokens
    propose(source, batch(text(100, 38), slots=[4]), limits(1))
    source.snapshot()
    learner.apply(from_another_replica(51, text(0), kind="purge", sequence=""))
    propose(source, batch(text(100, 38), text(40), slots=[5, 6]), limits(2))
    assert compiled() == before


@pytest.mark.parametrize("dtype", ["<i4", np.int64])
def test_tokens_may_be_any_integer_array(source: TrieSource, dtype: str) -> None:
    before = compiled()
    trie = TokenTrie(1 << 20)
    content = text(100).astype(dtype).tobytes()
    unaligned = np.frombuffer(b"x" + content, dtype, offset=1)
    for tokens in (np.frombuffer(content, dtype), unaligned, unaligned[::2]):
        sequence = trie.open(private=True)
        trie.append(sequence, tokens)
        found = look_up(trie, [tokens[:40]], [8], [sequence])
        assert found.tokens[0].tolist() == tokens[40:48].tolist()
        trie.finish(sequence)
    assert compiled() == before
