"""Writing to a real store, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from specserve.core.errors import StoreError
from specserve.trie import record_writer as module
from specserve.trie.namespaces import namespace
from specserve.trie.record_writer import RecordWriter
from specserve.trie.records import MAX_RECORD_TOKENS, ExchangeReply, ExchangeRequest, Record
from specserve.trie.store import StoreOptions, TrieStore

NAME = namespace("model")


class Line:
    """The way to a store; fails as often as it is told, after the store has dealt with the call."""

    def __init__(self, store: TrieStore) -> None:
        self.store = store
        self.failures = 0

    def exchange(self, request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        reply = self.store.exchange(request)
        if self.failures:
            self.failures -= 1
            raise StoreError("no answer")
        return reply


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.setattr(module, "_REST_S", 0.0)
    return Line(TrieStore(StoreOptions(fingerprint="model", vocab_size=1000)))


def texts(line: Line) -> dict[str, list[Record]]:
    """What a replica that starts now is told, by text."""
    request = ExchangeRequest("model", "replica", "", 0, [], 1 << 30)
    found: dict[str, list[Record]] = {}
    for record in line.store.exchange(request).records:
        assert record.namespace == NAME
        found.setdefault(record.sequence, []).append(record)
    return found


def tokens_of(records: list[Record]) -> Iterator[int]:
    for record in records:
        yield from record.token_array().tolist()


def test_replicas_get_every_text_whole_and_closed(line: Line) -> None:
    writer = RecordWriter(line, "model", NAME)
    long = np.arange(2 * MAX_RECORD_TOKENS + 5, dtype=np.int32) % 1000
    short = np.array([1, 2, 3], np.int32)
    writer.write(long, num_prompt_tokens=MAX_RECORD_TOKENS + 1)
    writer.write(short)
    writer.flush()

    first, second = texts(line).values()
    assert list(tokens_of(first)) == long.tolist()
    assert [record.start for record in first] == [0, MAX_RECORD_TOKENS, 2 * MAX_RECORD_TOKENS]
    assert [record.num_prompt_tokens for record in first] == [MAX_RECORD_TOKENS, 1, 0]
    assert [record.final for record in first] == [False, False, True]
    assert list(tokens_of(second)) == short.tolist()
    assert writer.num_tokens == len(long) + 3 == line.store.stats().num_tokens


def test_a_short_text_waits_for_the_end_and_many_are_sent_on_the_way(line: Line) -> None:
    writer = RecordWriter(line, "model", NAME)
    writer.write(np.array([1], np.int32))
    assert not texts(line)
    while not texts(line):
        writer.write(np.zeros(MAX_RECORD_TOKENS, np.int32))
    assert writer.num_tokens == line.store.stats().num_tokens > MAX_RECORD_TOKENS


def test_an_answer_that_got_lost_teaches_nothing_twice(line: Line) -> None:
    writer = RecordWriter(line, "model", NAME)
    line.failures = 3
    writer.write(np.array([1, 2], np.int32))
    writer.flush()
    assert writer.num_tokens == line.store.stats().num_tokens == 2


def test_a_store_that_stays_away_is_given_up(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    writer = RecordWriter(line, "model", NAME)
    line.failures = 1_000_000_000
    writer.write(np.array([1, 2], np.int32))
    with pytest.raises(StoreError, match="has not answered for"):
        writer.flush()
    assert writer.num_tokens == 0


def test_a_store_of_another_model_takes_nothing(line: Line) -> None:
    writer = RecordWriter(line, "another model", NAME)
    writer.write(np.array([1], np.int32))
    with pytest.raises(StoreError, match="must not mix"):
        writer.flush()
    assert not texts(line)
