"""Writing to a real store, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from specserve.core.errors import ConfigError, StoreError
from specserve.core.types import Int32Array
from specserve.trie import replica, text_writer
from specserve.trie.namespaces import namespace
from specserve.trie.records import MAX_RECORD_TOKENS, ExchangeReply, ExchangeRequest, Record
from specserve.trie.replica import ReplicaOptions
from specserve.trie.store import StoreOptions, TrieStore
from specserve.trie.text_writer import TextWriter, write_texts

NAME = namespace("model")
OPTIONS = StoreOptions(fingerprint="model", vocab_size=1000)


class Line:
    """The way to a store; fails as often as it is told, after the store has dealt with the call."""

    def __init__(self, store: TrieStore) -> None:
        self.store = store
        self.failures = self.num_received = 0

    def exchange(self, request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        reply = self.store.exchange(request)
        self.num_received += len(reply.records)
        if self.failures:
            self.failures -= 1
            raise StoreError("no answer")
        return reply


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.setattr(replica, "LONGEST_REST_S", 0.0)
    return Line(TrieStore(OPTIONS))


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


def of(*texts: int) -> Iterator[tuple[Int32Array, int]]:
    """Texts of so many tokens."""
    for size in texts:
        yield np.arange(size, dtype=np.int32) % 1000, 0


def test_replicas_get_every_text_whole_and_closed(line: Line) -> None:
    long = np.arange(2 * MAX_RECORD_TOKENS + 5, dtype=np.int32) % 1000
    short = np.array([1, 2, 3], np.int32)
    written = [(long, MAX_RECORD_TOKENS + 1), (short, 0)]
    assert write_texts(line, OPTIONS, NAME, written) == len(long) + 3
    first, second = texts(line).values()
    assert list(tokens_of(first)) == long.tolist()
    assert [record.start for record in first] == [0, MAX_RECORD_TOKENS, 2 * MAX_RECORD_TOKENS]
    assert [record.num_prompt_tokens for record in first] == [MAX_RECORD_TOKENS, 1, 0]
    assert [record.final for record in first] == [False, False, True]
    assert list(tokens_of(second)) == short.tolist()
    assert line.store.stats().num_tokens == len(long) + 3


def test_many_texts_are_sent_on_the_way(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_writer, "_TEXTS_AT_ONCE", 2)
    held = []

    def watched() -> Iterator[tuple[Int32Array, int]]:
        for text in of(1, 1, 1, 1, 1):
            held.append(line.store.stats().num_tokens)
            yield text

    assert write_texts(line, OPTIONS, NAME, watched()) == 5
    assert held == [0, 0, 2, 2, 4]


def test_an_answer_that_got_lost_teaches_nothing_twice(line: Line) -> None:
    line.failures = 3
    assert write_texts(line, OPTIONS, NAME, of(2)) == line.store.stats().num_tokens == 2


def test_texts_of_others_are_neither_asked_for_nor_waited_for(line: Line) -> None:
    for size in (3, 2):
        write_texts(line, OPTIONS, NAME, of(size))
    assert line.num_received == 0
    assert line.store.stats().num_tokens == 5


def test_a_store_that_stays_away_is_given_up(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_writer, "_PATIENCE_S", 0.0)
    line.failures = 1_000_000_000
    with pytest.raises(StoreError, match="has not answered for"):
        write_texts(line, OPTIONS, NAME, of(2))


def test_a_store_of_another_model_takes_nothing(line: Line) -> None:
    other = StoreOptions(fingerprint="another model", vocab_size=1000)
    with pytest.raises(StoreError, match="must not mix"):
        write_texts(line, other, NAME, of(1))
    assert not texts(line)


def test_texts_of_one_call_are_taken_whole_with_those_of_the_next(line: Line) -> None:
    writer = TextWriter(line, OPTIONS)
    long = np.arange(MAX_RECORD_TOKENS + 5, dtype=np.int32) % 1000
    writer.write(NAME, [(long, 3), *of(2)])
    writer.write(NAME, list(of(1)))
    found = list(texts(line).values())
    assert [list(tokens_of(each)) for each in found] == [long.tolist(), [0, 1], [0]]
    assert [each[-1].final for each in found] == [True, True, True]
    assert found[0][0].num_prompt_tokens == 3


def test_a_store_that_does_not_answer_is_given_no_texts(line: Line) -> None:
    writer = TextWriter(line, OPTIONS)
    line.failures = 1
    with pytest.raises(StoreError, match=r"^no answer$"):
        writer.write(NAME, list(of(2)))
    assert not texts(line)
    writer.write(NAME, list(of(2)))
    assert line.store.stats().num_tokens == 2


def test_a_store_that_stops_answering_in_the_midst_may_have_taken_all(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = line.exchange

    def fail_with_texts(request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        line.failures = int(bool(request.records))
        return exchange(request, timeout_s)

    monkeypatch.setattr(line, "exchange", fail_with_texts)
    with pytest.raises(StoreError, match="no answer; it has taken all of these texts or none"):
        TextWriter(line, OPTIONS).write(NAME, list(of(2, 3)))
    assert line.store.stats().num_tokens == 5


def test_one_call_takes_no_more_than_a_quarter_of_the_log_whoever_started_the_store() -> None:
    started_with = StoreOptions(fingerprint="model", vocab_size=1000, max_bytes=1 << 20)
    line = Line(TrieStore(started_with))
    writer = TextWriter(line, OPTIONS)
    with pytest.raises(
        ConfigError, match=r"bytes of tokens' is not allowed; allowed: at most 2621"
    ):
        writer.write(NAME, list(of(1 << 16)))
    assert line.store.stats().num_tokens == 0
    writer.write(NAME, list(of(1 << 15)))
    assert line.store.stats().num_tokens == 1 << 15


def test_a_writer_is_not_taken_for_another_models(line: Line) -> None:
    other = StoreOptions(fingerprint="another model", vocab_size=1000)
    with pytest.raises(StoreError, match="must not mix"):
        TextWriter(line, other).write(NAME, list(of(1)))
    assert not texts(line)


def test_texts_that_are_more_than_wait_at_once_are_all_sent(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_writer, "_TOKENS_AT_ONCE", 5)
    held = []

    def watched() -> Iterator[tuple[Int32Array, int]]:
        for text in of(2, 4, 1, 9):
            held.append(line.store.stats().num_tokens)
            yield text

    assert write_texts(line, OPTIONS, NAME, watched()) == 16
    assert held == [0, 0, 6, 6]


def test_what_was_dropped_before_it_was_sent_is_no_success(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_writer, "ReplicaOptions", partial(ReplicaOptions, max_bytes=1 << 16))
    with pytest.raises(StoreError, match=r"\d+ of 60000 tokens were dropped"):
        write_texts(line, OPTIONS, NAME, of(30_000, 30_000))
