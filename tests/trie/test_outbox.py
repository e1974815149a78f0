from __future__ import annotations

from math import inf

import numpy as np

from specserve.trie.outbox import Outbox
from specserve.trie.pieces import Piece
from specserve.trie.records import MAX_RECORD_TOKENS, Record
from specserve.trie.token_log import MIN_BYTES
from tests.trie.texts import VOCAB_SIZE, pack, purge, record


def piece(
    num_tokens: int = 3,
    start: int = 0,
    num_prompt_tokens: int = 0,
    final: bool = False,
    stamp: float = 1e9,
) -> Piece:
    tokens = pack(list(range(num_tokens)))
    return Piece("tenant", "request", start, tokens, num_prompt_tokens, final, stamp)


def new_outbox(max_bytes: int = 1 << 20) -> Outbox:
    return Outbox("me", max_bytes, VOCAB_SIZE)


def sent(outbox: Outbox, max_bytes: int = 1 << 20) -> list[Record]:
    """Sends and confirms everything."""
    found: list[Record] = []
    while records := outbox.pending(max_bytes):
        found += records
        outbox.confirm()
    return found


def numbers(records: list[Record]) -> list[tuple[str, int]]:
    return [(each.origin, each.number) for each in records]


def test_what_was_written_is_pending_until_it_is_confirmed() -> None:
    outbox = new_outbox()
    assert outbox.oldest_unsent_stamp == inf
    outbox.write(piece(stamp=7.0))
    outbox.write(piece(stamp=8.0, start=3, final=True))
    assert numbers(outbox.pending(1)) == [("me", 1)]
    assert numbers(outbox.pending(1)) == [("me", 1)]
    assert outbox.oldest_unsent_stamp == 7.0
    outbox.confirm()
    assert outbox.oldest_unsent_stamp == 8.0
    (last,) = outbox.pending(1)
    assert (last.number, last.start, last.final, last.namespace) == (2, 3, True, "tenant")
    outbox.confirm()
    assert outbox.pending(1) == []
    assert outbox.oldest_unsent_stamp == inf


def test_a_long_piece_becomes_several_records() -> None:
    outbox = Outbox("me", 1 << 20, 1 << 20)
    size = 2 * MAX_RECORD_TOKENS + 5
    outbox.write(piece(size, start=10, num_prompt_tokens=MAX_RECORD_TOKENS + 2, final=True))
    records = sent(outbox)
    assert [each.start for each in records] == [
        10,
        10 + MAX_RECORD_TOKENS,
        10 + 2 * MAX_RECORD_TOKENS,
    ]
    assert [each.num_prompt_tokens for each in records] == [MAX_RECORD_TOKENS, 2, 0]
    assert [each.final for each in records] == [False, False, True]
    assert np.concatenate([each.token_array() for each in records]).tolist() == list(range(size))


def test_an_end_without_tokens_is_a_record() -> None:
    outbox = new_outbox()
    outbox.write(piece(0, start=5, final=True))
    (end,) = sent(outbox)
    assert (end.start, end.num_tokens, end.final) == (5, 0, True)


def test_what_the_store_handed_out_is_not_sent_back() -> None:
    outbox = new_outbox()
    assert outbox.receive(record(1, origin="other"))
    assert not outbox.receive(record(1, origin="other"))
    assert sent(outbox) == []


def test_a_store_that_lost_its_memory_is_sent_own_records_and_then_others() -> None:
    outbox = new_outbox()
    outbox.receive(record(1, origin="other"))
    outbox.write(piece())
    outbox.receive(record(2, origin="other"))
    outbox.write(piece())
    sent(outbox)
    outbox.start_over({"other": [(1, 1)], "me": [(2, 2)]})
    assert numbers(sent(outbox)) == [("me", 1), ("other", 2)]
    outbox.start_over({})
    assert numbers(sent(outbox, 1)) == [("me", 1), ("me", 2), ("other", 1), ("other", 2)]


def test_what_another_replica_has_sent_meanwhile_is_left_out() -> None:
    outbox = new_outbox()
    outbox.receive(record(1, origin="other"))
    outbox.receive(record(2, origin="other"))
    outbox.start_over({})
    assert not outbox.receive(record(1, origin="other"))
    assert numbers(sent(outbox)) == [("other", 2)]


def test_a_store_that_lost_its_memory_is_sent_the_orders_too() -> None:
    outbox = new_outbox(MIN_BYTES)
    outbox.receive(purge(stamp=1e9, namespace="gone"))
    for _ in range(1000):
        outbox.write(piece(100))
    sent(outbox)
    outbox.start_over({})
    assert ("operator", 1) in numbers(sent(outbox))


def test_forgotten_text_is_not_sent() -> None:
    outbox = new_outbox()
    outbox.write(piece(stamp=1e9))
    outbox.receive(purge(stamp=1e9))
    outbox.write(piece(stamp=1e9))
    outbox.write(piece(stamp=1e9 + 1))
    assert numbers(sent(outbox)) == [("me", 3)]
    assert outbox.dropped_tokens == 0


def test_own_text_that_was_dropped_before_it_was_sent_is_counted() -> None:
    outbox = new_outbox(MIN_BYTES)
    for number in range(1, 300):
        outbox.receive(record(number, range(100), origin="other"))
    assert outbox.dropped_tokens == 0
    for _ in range(50):
        outbox.write(piece(100))
    sent(outbox)
    for _ in range(300):
        outbox.write(piece(100))
    left = sent(outbox)
    assert outbox.dropped_tokens == 100 * (300 - len(left)) > 0


def test_bad_tokens_are_neither_kept_nor_sent() -> None:
    outbox = new_outbox()
    outbox.write(piece(VOCAB_SIZE + 1))
    outbox.write(piece())
    assert numbers(sent(outbox)) == [("me", 2)]
    assert outbox.invalid_records == 1
