from __future__ import annotations

from math import inf

from specserve.trie.outbox import Outbox
from specserve.trie.records import Record
from specserve.trie.token_log import MIN_BYTES
from tests.trie.texts import purge, record


class Writer:
    """Writes consecutive records of one request into an outbox."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.outbox = Outbox("me", max_bytes)
        self._last_number = 0

    def __call__(self, num_tokens: int = 3, stamp: float = 1e9) -> None:
        self._last_number += 1
        tokens = range(num_tokens)
        self.outbox.write(record(self._last_number, tokens, origin="me", stamp=stamp))


def sent(outbox: Outbox, max_bytes: int = 1 << 20) -> list[Record]:
    """Sends and confirms everything."""
    found: list[Record] = []
    while records := outbox.pending(max_bytes):
        found += records
        outbox.confirm(records)
    return found


def numbers(records: list[Record]) -> list[tuple[str, int]]:
    return [(each.origin, each.number) for each in records]


def test_records_are_pending_until_they_are_confirmed() -> None:
    write = Writer()
    outbox = write.outbox
    assert outbox.is_empty
    assert outbox.oldest_unsent_stamp == inf
    write(stamp=7.0)
    write(stamp=8.0)
    assert numbers(outbox.pending(1)) == [("me", 1)]
    assert numbers(outbox.pending(1)) == [("me", 1)]
    assert outbox.oldest_unsent_stamp == 7.0
    outbox.confirm(outbox.pending(1))
    assert outbox.oldest_unsent_stamp == 8.0
    assert numbers(outbox.pending(1)) == [("me", 2)]
    outbox.confirm(outbox.pending(1))
    assert outbox.pending(1) == []
    assert outbox.oldest_unsent_stamp == inf


def test_received_records_are_not_sent_back() -> None:
    outbox = Writer().outbox
    assert outbox.receive(record(1, origin="other"))
    assert not outbox.receive(record(1, origin="other"))
    assert sent(outbox) == []


def test_a_store_that_lost_its_log_gets_own_records_then_others() -> None:
    write = Writer()
    outbox = write.outbox
    outbox.receive(record(1, origin="other"))
    write()
    outbox.receive(record(2, origin="other"))
    write()
    sent(outbox)
    outbox.start_over({"other": [(1, 1)], "me": [(2, 2)]})
    assert numbers(sent(outbox)) == [("me", 1), ("other", 2)]
    outbox.start_over({})
    assert numbers(sent(outbox, 1)) == [("me", 1), ("me", 2), ("other", 1), ("other", 2)]


def test_records_that_another_replica_resent_are_not_sent() -> None:
    outbox = Writer().outbox
    outbox.receive(record(1, origin="other"))
    outbox.receive(record(2, origin="other"))
    outbox.start_over({})
    assert not outbox.receive(record(1, origin="other"))
    assert numbers(sent(outbox)) == [("other", 2)]


def test_a_store_that_lost_its_log_gets_the_tombstones_first() -> None:
    write = Writer(MIN_BYTES)
    write.outbox.receive(purge(stamp=1e9, namespace="gone"))
    for _ in range(1000):
        write(100)
    sent(write.outbox)
    write.outbox.start_over({})
    assert numbers(write.outbox.pending(1)) == [("operator", 1)]


def test_an_unsent_purge_is_sent_though_the_full_log_has_dropped_it() -> None:
    write = Writer(MIN_BYTES)
    write.outbox.receive(purge(stamp=1e9, namespace="gone"))
    write.outbox.start_over({})
    for _ in range(1000):
        write(100)
    assert numbers(write.outbox.pending(1)) == [("operator", 1)]


def test_purged_text_is_not_sent() -> None:
    write = Writer()
    write(stamp=1e9)
    write.outbox.receive(purge(stamp=1e9))
    write(stamp=1e9)
    write(stamp=1e9 + 1)
    assert numbers(sent(write.outbox)) == [("me", 3)]
    assert write.outbox.dropped_tokens == 0


def test_own_text_that_is_dropped_unsent_is_counted() -> None:
    write = Writer(MIN_BYTES)
    outbox = write.outbox
    for number in range(1, 300):
        outbox.receive(record(number, range(100), origin="other"))
    assert outbox.dropped_tokens == 0
    for _ in range(50):
        write(100)
    sent(outbox)
    for _ in range(300):
        write(100)
    left = sent(outbox)
    assert outbox.dropped_tokens == 100 * (300 - len(left)) > 0
