from __future__ import annotations

import time
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from specserve.trie.records import (
    MAX_NAME_CHARS,
    MAX_RECORD_TOKENS,
    Record,
    TextPiece,
    problem_of,
    records_of,
)
from specserve.trie.token_log import TokenLog
from tests.trie.texts import VOCAB_SIZE, purge, record


@pytest.mark.parametrize(
    "good",
    [
        record(tokens=[0, VOCAB_SIZE - 1]),
        record(tokens=[], final=True),
        record(tokens=[1] * MAX_RECORD_TOKENS),
        record(namespace="n" * MAX_NAME_CHARS),
        record(stamp=time.time() + 5),
        purge(),
    ],
)
def test_a_well_formed_record_has_no_problem(good: Record) -> None:
    assert problem_of(good, VOCAB_SIZE) == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokens": [VOCAB_SIZE]}, "not in 0 .. 999"),
        ({"tokens": [-1]}, "not in 0 .. 999"),
        ({"tokens": [1] * (MAX_RECORD_TOKENS + 1)}, "bytes"),
        ({"stamp": float("nan")}, "its stamp is no time"),
        ({"origin": ""}, "origin"),
        ({"namespace": ""}, "namespace"),
        ({"namespace": "n" * (MAX_NAME_CHARS + 1)}, "namespace"),
        ({"namespace": "ä"}, "ASCII"),
    ],
)
def test_an_invalid_record_is_refused_with_a_reason(fields: dict[str, Any], said: str) -> None:
    assert said in problem_of(record(**fields), VOCAB_SIZE)


def test_a_partial_token_is_refused() -> None:
    bad = msgspec.structs.replace(record(), tokens=b"12345")
    assert "5 bytes" in problem_of(bad, VOCAB_SIZE)


def test_tokens_are_read_as_they_were_written() -> None:
    assert record(tokens=[7, 0, 999]).token_array().tolist() == [7, 0, 999]
    assert record(tokens=[7, 0, 999]).num_tokens == 3


def test_a_long_piece_becomes_several_records() -> None:
    size = 2 * MAX_RECORD_TOKENS + 5
    tokens = np.arange(size, dtype=np.int32)
    piece = TextPiece("n", "s", 10, tokens, final=True)
    records = records_of("me", 7, piece)
    assert [each.number for each in records] == [7, 8, 9]
    assert [each.start - 10 for each in records] == [0, MAX_RECORD_TOKENS, 2 * MAX_RECORD_TOKENS]
    assert [each.final for each in records] == [False, False, True]
    assert np.concatenate([each.token_array() for each in records]).tolist() == tokens.tolist()


def test_an_end_without_tokens_is_a_record() -> None:
    (end,) = records_of("me", 1, TextPiece("n", "s", 5, np.zeros(0, np.int32), final=True))
    assert (end.start, end.num_tokens, end.final) == (5, 0, True)


def test_a_record_takes_no_more_memory_than_is_counted_for_it() -> None:
    records = [
        record(number, range(40), start=1000 + number, sequence=f"request-{number:032d}")
        for number in range(1000, 3000)
    ]
    encoded = [msgspec.msgpack.encode(each) for each in records]
    log = TokenLog(1 << 30)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for each in encoded:
            log.append(msgspec.msgpack.decode(each, type=Record))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * log.num_bytes < after - before < log.num_bytes
