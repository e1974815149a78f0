from __future__ import annotations

import threading
from math import inf

import numpy as np

from specserve.trie import pieces
from specserve.trie.pieces import FULL_TOKENS, Piece, PieceQueue


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def put(
    queue: PieceQueue,
    tokens: range,
    sequence: str = "request",
    num_prompt_tokens: int = 0,
    final: bool = False,
) -> bool:
    """Tokens that are their own positions."""
    array = np.arange(tokens.start, tokens.stop, dtype=np.int32)
    return queue.put("tenant", sequence, tokens.start, array, num_prompt_tokens, final)


def seen(found: list[Piece]) -> list[tuple[str, int, int]]:
    """Sequence, and the first and last position."""
    for piece in found:
        assert np.frombuffer(piece.tokens, "<i4").tolist() == list(
            range(piece.start, piece.start + piece.num_tokens)
        )
    return [(each.sequence, each.start, each.start + each.num_tokens) for each in found]


def test_pieces_of_one_text_wait_for_each_other() -> None:
    clock = Clock()
    queue = PieceQueue(1000, max_delay_s=1.0, wall_clock=clock)
    put(queue, range(0, 5), num_prompt_tokens=5)
    put(queue, range(0, 3), "other")
    clock.now += 0.5
    put(queue, range(5, 7))
    assert list(queue.joined()) == []
    assert queue.oldest_stamp == 100.0
    clock.now += 0.5
    first, second = sorted(queue.joined(), key=lambda piece: piece.sequence)
    assert seen([first, second]) == [("other", 0, 3), ("request", 0, 7)]
    assert (second.num_prompt_tokens, second.stamp, second.final) == (5, 100.0, False)
    assert (queue.num_waiting, queue.oldest_stamp) == (0, inf)


def test_a_long_text_and_a_finished_one_do_not_wait() -> None:
    queue = PieceQueue(1000, max_delay_s=1000)
    put(queue, range(0, FULL_TOKENS))
    put(queue, range(0, 2), "other")
    put(queue, range(2, 2), "other", final=True)
    found = list(queue.joined())
    assert seen(found) == [("request", 0, FULL_TOKENS), ("other", 0, 2)]
    assert [piece.final for piece in found] == [False, True]


def test_at_the_end_nothing_waits() -> None:
    queue = PieceQueue(1000, max_delay_s=1000)
    put(queue, range(0, 2))
    assert seen(list(queue.joined(everything=True))) == [("request", 0, 2)]


def test_pieces_with_a_gap_between_them_are_not_joined() -> None:
    queue = PieceQueue(1000, max_delay_s=0.0)
    put(queue, range(0, 2))
    put(queue, range(3, 5))
    assert seen(list(queue.joined())) == [("request", 0, 2), ("request", 3, 5)]


def test_prompt_tokens_are_never_joined_to_output_before_them() -> None:
    queue = PieceQueue(1000, max_delay_s=0.0)
    put(queue, range(0, 4), num_prompt_tokens=4)
    put(queue, range(4, 8), num_prompt_tokens=2)
    put(queue, range(8, 9), num_prompt_tokens=1)
    found = list(queue.joined())
    assert seen(found) == [("request", 0, 8), ("request", 8, 9)]
    assert [piece.num_prompt_tokens for piece in found] == [6, 1]


def test_what_does_not_fit_is_dropped_and_counted_until_there_is_room() -> None:
    queue = PieceQueue(10, max_delay_s=0.0)
    assert put(queue, range(0, 8))
    assert not put(queue, range(8, 11))
    assert put(queue, range(11, 13))
    assert (queue.dropped_tokens, queue.put_tokens, queue.num_waiting) == (3, 10, 10)
    assert seen(list(queue.joined())) == [("request", 0, 8), ("request", 11, 13)]
    assert put(queue, range(13, 23))


def test_pieces_without_tokens_are_bounded_too() -> None:
    queue = PieceQueue(10, max_delay_s=0.0)
    results = [put(queue, range(0, 0)) for _ in range(pieces.MAX_PIECES + 1)]
    assert results == [True] * pieces.MAX_PIECES + [False]


def test_tokens_are_copied() -> None:
    queue = PieceQueue(10, max_delay_s=0.0)
    buffer = np.array([1, 2, 3, 4], dtype=np.int32)
    queue.put("tenant", "request", 0, buffer[::2], 0, False)
    buffer[:] = 9
    (piece,) = queue.joined()
    assert np.frombuffer(piece.tokens, "<i4").tolist() == [1, 3]


def test_two_threads_lose_nothing_between_them() -> None:
    queue = PieceQueue(1 << 30, max_delay_s=0.0)
    number = 20_000

    def write() -> None:
        for position in range(number):
            put(queue, range(position, position + 1))

    writer = threading.Thread(target=write)
    writer.start()
    found: list[Piece] = []
    while writer.is_alive():
        found += queue.joined()
    found += queue.joined(everything=True)
    spans = seen(found)
    assert [begin for _, begin, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
    assert spans[-1][2] == number
