from __future__ import annotations

import threading
from math import inf

from specserve.trie.pieces import MAX_PIECES, Piece, PieceQueue
from tests.trie.texts import pack


def piece(begin: int, end: int) -> Piece:
    """Tokens that are their own positions."""
    return Piece("tenant", "request", begin, pack(range(begin, end)), 0, False, 100.0)


def test_pieces_come_out_as_they_went_in() -> None:
    queue = PieceQueue(1000)
    put = [piece(0, 5), piece(5, 5), piece(5, 7)]
    assert queue.oldest_stamp == inf
    assert all(map(queue.put, put))
    assert (queue.num_waiting, queue.oldest_stamp) == (7, 100.0)
    assert list(queue.taken()) == put
    assert (queue.num_waiting, queue.oldest_stamp) == (0, inf)


def test_what_does_not_fit_is_dropped_and_counted_until_there_is_room() -> None:
    queue = PieceQueue(10)
    assert queue.put(piece(0, 8))
    assert not queue.put(piece(8, 11))
    assert queue.put(piece(11, 13))
    assert (queue.dropped_tokens, queue.put_tokens, queue.num_waiting) == (3, 10, 10)
    assert [each.start for each in queue.taken()] == [0, 11]
    assert queue.put(piece(13, 23))


def test_pieces_without_tokens_are_bounded_too() -> None:
    queue = PieceQueue(10)
    results = [queue.put(piece(0, 0)) for _ in range(MAX_PIECES + 1)]
    assert results == [True] * MAX_PIECES + [False]


def test_two_threads_lose_nothing_between_them() -> None:
    queue = PieceQueue(1 << 30)
    number = 20_000

    def write() -> None:
        for position in range(number):
            queue.put(piece(position, position + 1))

    writer = threading.Thread(target=write)
    writer.start()
    found: list[Piece] = []
    while writer.is_alive():
        found += queue.taken()
    found += queue.taken()
    assert [each.start for each in found] == list(range(number))
