"""Writing to a real store in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specserve.core.errors import ConfigError, StoreError
from specserve.core.types import Int32Array
from specserve.trie import text_writer
from specserve.trie.namespaces import namespace
from specserve.trie.records import (
    MAX_RECORD_TOKENS,
    RECORD_OVERHEAD_BYTES,
    ExchangeReply,
    ExchangeRequest,
    Record,
)
from specserve.trie.store import StoreOptions, TrieStore
from specserve.trie.text_writer import TextWriter

NAME = namespace("model")
OPTIONS = StoreOptions(fingerprint="model", vocab_size=1000)


class Link:
    """A client of a store. ``failures`` calls reach the store, but their answers are lost."""

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
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    monkeypatch.setattr(text_writer, "_RETRY_S", 0.0)
    return Link(TrieStore(OPTIONS))


def texts(link: Link) -> dict[str, list[Record]]:
    """The records that a new replica receives, by sequence."""
    request = ExchangeRequest("replica", "", 0, [], 1 << 30)
    found: dict[str, list[Record]] = {}
    for record in link.store.exchange(request).records:
        assert record.namespace == NAME
        found.setdefault(record.sequence, []).append(record)
    return found


def tokens_of(records: list[Record]) -> Iterator[int]:
    for record in records:
        yield from record.token_array().tolist()


def texts_of(*texts: int) -> Iterator[Int32Array]:
    """Texts with these numbers of tokens."""
    for size in texts:
        yield np.arange(size, dtype=np.int32) % 1000


@pytest.mark.parametrize("is_many", [False, True])
def test_texts_after_a_purge_are_kept_although_this_clock_is_late(
    link: Link, is_many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: now + 60)
        link.store.purge(NAME)
    writer = TextWriter(link)
    write = writer.write_many if is_many else writer.write
    write(NAME, [*texts_of(3)])
    assert link.store.stats().num_tokens == 3


def test_replicas_get_every_text_whole_and_final(link: Link) -> None:
    long = np.arange(2 * MAX_RECORD_TOKENS + 5, dtype=np.int32) % 1000
    short = np.array([1, 2, 3], np.int32)
    assert TextWriter(link).write_many(NAME, [long, short]) == len(long) + 3
    first, second = texts(link).values()
    assert list(tokens_of(first)) == long.tolist()
    assert [record.start for record in first] == [0, MAX_RECORD_TOKENS, 2 * MAX_RECORD_TOKENS]
    assert [record.final for record in first] == [False, False, True]
    assert list(tokens_of(second)) == short.tolist()
    assert link.store.stats().num_tokens == len(long) + 3


def test_texts_are_sent_in_batches(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    record_bytes = RECORD_OVERHEAD_BYTES + len("0123456789abcdef-1") + 4
    monkeypatch.setattr(text_writer, "BATCH_BYTES", 2 * record_bytes)
    held = []

    def watched() -> Iterator[Int32Array]:
        for text in texts_of(1, 1, 1, MAX_RECORD_TOKENS + 1, 1):
            held.append(link.store.stats().num_tokens)
            yield text

    written = MAX_RECORD_TOKENS + 5
    assert TextWriter(link).write_many(NAME, watched()) == written
    assert held == [0, 0, 2, 2, written - 2]
    assert link.store.stats().num_tokens == written


def test_after_a_lost_answer_no_text_is_stored_twice(link: Link) -> None:
    link.failures = 3
    assert TextWriter(link).write_many(NAME, texts_of(2)) == link.store.stats().num_tokens == 2


def test_a_writer_receives_no_texts_of_others(link: Link) -> None:
    for size in (3, 2):
        TextWriter(link).write_many(NAME, texts_of(size))
    assert link.num_received == 0
    assert link.store.stats().num_tokens == 5


def test_a_store_without_answers_is_an_error(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_writer, "_PATIENCE_S", 0.01)
    link.failures = 1_000_000_000
    with pytest.raises(StoreError, match="has not answered for"):
        TextWriter(link).write_many(NAME, texts_of(2))


@pytest.mark.parametrize("method", [TextWriter.write, TextWriter.write_many])
def test_a_refusal_is_an_error_at_once(
    link: Link, monkeypatch: pytest.MonkeyPatch, method: Callable[..., object]
) -> None:
    calls = []

    def refuse(request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        calls.append(request)
        return ExchangeReply(epoch="", refused="its version may be another one")

    monkeypatch.setattr(link, "exchange", refuse)
    with pytest.raises(StoreError, match=r"^its version may be another one$"):
        method(TextWriter(link), NAME, list(texts_of(1)))
    assert len(calls) == 1


def test_a_writer_can_write_several_times(link: Link) -> None:
    writer = TextWriter(link)
    long = np.arange(MAX_RECORD_TOKENS + 5, dtype=np.int32) % 1000
    writer.write(NAME, [long, *texts_of(2)])
    writer.write(NAME, list(texts_of(1)))
    found = list(texts(link).values())
    assert [list(tokens_of(each)) for each in found] == [long.tolist(), [0, 1], [0]]
    assert [each[-1].final for each in found] == [True, True, True]


def test_no_text_is_sent_to_a_store_that_is_silent(link: Link) -> None:
    writer = TextWriter(link)
    link.failures = 1
    with pytest.raises(StoreError, match=r"^no answer$"):
        writer.write(NAME, list(texts_of(2)))
    assert not texts(link)
    writer.write(NAME, list(texts_of(2)))
    assert link.store.stats().num_tokens == 2


def test_a_store_that_stops_answering_may_have_stored_all_texts(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = link.exchange

    def fail_with_texts(request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        link.failures = int(bool(request.records))
        return exchange(request, timeout_s)

    monkeypatch.setattr(link, "exchange", fail_with_texts)
    with pytest.raises(StoreError, match="no answer; it has taken all of these texts or none"):
        TextWriter(link).write(NAME, list(texts_of(2, 3)))
    assert link.store.stats().num_tokens == 5


def test_one_call_may_write_at_most_a_quarter_of_the_log() -> None:
    started_with = StoreOptions(fingerprint="model", vocab_size=1000, max_bytes=1 << 20)
    link = Link(TrieStore(started_with))
    writer = TextWriter(link)
    with pytest.raises(
        ConfigError, match=r"bytes of tokens' is not allowed; allowed: at most 2621"
    ):
        writer.write(NAME, list(texts_of(1 << 16)))
    assert link.store.stats().num_tokens == 0
    writer.write(NAME, list(texts_of(1 << 15)))
    assert link.store.stats().num_tokens == 1 << 15


def test_a_restarted_store_that_lost_texts_is_an_error(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_writer, "BATCH_BYTES", 1)

    def watched() -> Iterator[Int32Array]:
        yield from texts_of(1)
        link.store = TrieStore(OPTIONS)
        yield from texts_of(1)

    with pytest.raises(StoreError, match="restarted and lost texts"):
        TextWriter(link).write_many(NAME, watched())


def test_a_restarted_store_that_still_has_all_texts_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_writer, "BATCH_BYTES", 1)
    options = StoreOptions(fingerprint="model", vocab_size=1000, snapshot_url=str(tmp_path))
    link = Link(TrieStore(options))

    def watched() -> Iterator[Int32Array]:
        yield from texts_of(1)
        link.store.close()
        link.store = TrieStore(options)
        yield from texts_of(1)

    assert TextWriter(link).write_many(NAME, watched()) == 2
    assert link.store.stats().num_tokens == 2
    link.store.close()
