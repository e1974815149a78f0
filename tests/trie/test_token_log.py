from __future__ import annotations

import time

import pytest

from specserve.trie import token_log
from specserve.trie.records import Record
from specserve.trie.token_log import MIN_BYTES, SCANNED, TokenLog
from specserve.trie.tombstones import MAX_TOMBSTONES
from tests.trie.texts import purge, record


def new_log(max_bytes: int = 1 << 20) -> TokenLog:
    return TokenLog(max_bytes)


def read(log: TokenLog, position: int = 0) -> list[Record]:
    """All records from a position on, in small batches."""
    found: list[Record] = []
    while True:
        records, position, behind = log.since(position, 1000)
        found += records
        if not behind:
            return found


def test_a_reader_gets_each_record_once_and_in_order() -> None:
    log = new_log()
    records = [record(number, [number]) for number in range(1, 50)]
    for each in records:
        assert log.append(each)
    assert read(log) == records
    position = log.end
    assert read(log, position) == []
    log.append(record(50))
    assert read(log, position) == [record(50)]


def test_a_batch_is_limited_and_tells_how_many_are_left() -> None:
    log = new_log()
    for number in range(1, 11):
        log.append(record(number, range(100)))
    records, position, behind = log.since(0, 2 * record(1, range(100)).num_bytes)
    assert (len(records), position, behind) == (2, 2, 8)
    assert len(log.since(0, 1)[0]) == 1


def test_a_reader_moves_past_records_that_it_filters_out() -> None:
    log = new_log(1 << 24)
    for number in range(1, SCANNED + 10):
        log.append(record(number, [], final=True))
    log.append(record(1, origin="other"))
    assert log.since(0, 1000, lambda each: each.origin == "other") == ([], SCANNED, 10)
    records, _, behind = log.since(SCANNED, 1000, lambda each: each.origin == "other")
    assert (records, behind) == ([record(1, origin="other")], 0)


def test_a_record_is_stored_once_in_any_order() -> None:
    log = new_log()
    taken = [log.append(record(number)) for number in (2, 1, 2, 4, 1, 3)]
    assert taken == [True, True, False, True, False, True]
    assert log.append(record(2, origin="other"))


def test_the_oldest_records_are_dropped_at_the_memory_limit() -> None:
    dropped: list[Record] = []
    log = TokenLog(MIN_BYTES, dropped.append)
    records = [record(number, range(number % 300)) for number in range(1, 3000)]
    for each in records:
        log.append(each)
        assert log.num_bytes <= MIN_BYTES
    assert dropped + read(log) == records
    assert log.dropped_tokens == sum(each.num_tokens for each in dropped)
    assert log.num_tokens == sum(each.num_tokens for each in read(log))
    assert log.num_bytes == sum(each.num_bytes for each in read(log))
    assert log.num_records == len(read(log))
    assert log.tokens_by_namespace == {"tenant": log.num_tokens}


def test_a_slow_reader_continues_with_the_oldest_record() -> None:
    log = new_log(MIN_BYTES)
    log.append(record(1))
    _, position, _ = log.since(0, 1)
    for number in range(2, 1000):
        log.append(record(number, range(100)))
    records, _, _ = log.since(position, 1)
    assert log.start > position
    assert records == [record(log.start + 1, range(100))]


def test_a_position_after_the_end_reads_nothing() -> None:
    log = new_log()
    log.append(record())
    assert log.since(99, 1000) == ([], 1, 0)


def test_a_purge_removes_its_namespace_only() -> None:
    log = new_log()
    log.append(record(1))
    log.append(record(2, namespace="other"))
    log.append(record(3))
    position = log.end
    log.append(purge(stamp=1e9))
    assert read(log, 1) == [record(2, namespace="other"), purge(stamp=1e9)]
    assert read(log, position) == [purge(stamp=1e9)]
    assert log.num_tokens == 3
    assert log.tokens_by_namespace == {"other": 3}


def test_after_a_purge_only_newer_text_is_accepted() -> None:
    log = new_log()
    log.append(purge(stamp=1e9))
    assert not log.append(record(1, stamp=1e9))
    assert log.append(record(2, stamp=1e9 + 1))
    assert log.append(record(3, namespace="other"))
    assert log.num_tokens == 6


def test_a_reader_that_lost_records_still_gets_the_tombstones() -> None:
    log = new_log(MIN_BYTES)
    log.append(record(1, namespace="other"))
    position = log.end
    log.append(purge(stamp=1e9))
    for number in range(2, 1000):
        log.append(record(number, range(100), stamp=1e9 + 1))
    assert log.since(position, 1)[0][0] == purge(stamp=1e9)
    assert purge(stamp=1e9) not in read(log, log.start)


def test_a_new_reader_gets_old_tombstones_before_newer_text() -> None:
    log = new_log()
    log.append(record(1, stamp=1e9 + 1))
    log.append(purge(stamp=1e9))
    first, text, *rest = read(log)
    assert (first, text) == (purge(stamp=1e9), record(1, stamp=1e9 + 1))
    assert all(each == first for each in rest)


def test_places_of_tombstones_that_the_log_has_dropped_are_forgotten() -> None:
    log = new_log(MIN_BYTES)
    for number in range(1, 2000):
        log.append(purge(number, namespace=f"tenant-{number}"))
    assert len(log._tombstone_at) == log.num_records < 1999


def test_the_memory_of_tombstones_is_bounded() -> None:
    log = new_log(MIN_BYTES)
    for number in range(1, MAX_TOMBSTONES + 100):
        log.append(purge(number, namespace=f"tenant-{number}"))
        assert log.num_bytes <= MIN_BYTES
    assert len(log.tombstones.in_force()) == MAX_TOMBSTONES
    for number in range(1, 100):
        log.append(record(number, range(100)))
    assert log.num_tokens >= MIN_BYTES // 4 // 4


def test_a_restored_log_has_all_records_and_accepts_none_again() -> None:
    log = new_log(MIN_BYTES)
    for number in range(1, 1000):
        log.append(record(number, range(number % 50), namespace=f"tenant-{number % 3}"))
    log.append(purge(namespace="tenant-1", stamp=1e9))
    log.append(record(1000))
    restored = new_log(MIN_BYTES)
    restored.restore(log.state())
    assert set(read(restored)) == set(read(log))
    assert restored.num_tokens == log.num_tokens
    assert restored.num_bytes <= log.num_bytes
    assert not restored.append(record(1))  # the first log had dropped it
    assert not restored.append(record(2000, namespace="tenant-1"))
    assert restored.append(record(2001))


def test_records_restored_late_follow_existing_ones() -> None:
    log, late = new_log(), new_log()
    log.append(record(1))
    late.append(record(2))
    late.restore(log.state())
    assert read(late) == [record(2), record(1)]
    assert not late.append(record(1))


def test_each_namespace_has_a_newest_stamp() -> None:
    log = new_log()
    now = time.time()
    log.append(record(1, stamp=now))
    log.append(record(2, stamp=now - 1))
    log.append(record(3, stamp=now + 1, namespace="other"))
    assert log.newest_stamp("tenant") == now
    assert log.newest_stamp("nobody") == 0


def test_a_purge_of_what_the_log_does_not_hold_scans_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = TokenLog(1 << 20)
    log.append(record(1))
    monkeypatch.setattr(token_log, "is_purged_by", None)
    for number in (1, 2):
        assert log.newest_stamp("other") == 0
        log.append(Record("store", number, float(number), "other", "purge"))
    assert [each.kind for each in log.records()] == ["text", "purge"]


def test_a_newer_purge_replaces_older_ones_of_its_namespace() -> None:
    log = TokenLog(1 << 20)
    for number in range(1, 101):
        log.append(Record("store", number, float(number), "n", "purge"))
    log.append(Record("store", 101, 50.0, "other", "purge"))
    assert [(each.namespace, each.stamp) for each in log.records()] == [
        ("n", 100.0),
        ("other", 50.0),
    ]
