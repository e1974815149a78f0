from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.core.errors import WireError
from specserve.wire.frames import MAX_HEADER_BYTES, Frame, decode_question, decode_reply, encode
from specserve.wire.messages import (
    LAST,
    MAX_ROWS,
    MAX_STATE_BYTES,
    MAX_TOKENS,
    Card,
    DraftAnswer,
    DraftRequest,
    Greeting,
    Hello,
    Question,
    Refusal,
    Reply,
    RowAnswer,
    TextRow,
)

HIDDEN_SIZE = 3
CARD = Card(
    kind="mtp",
    model="/models/m",
    vocab_size=100,
    tokenizer="",
    hidden_size=HIDDEN_SIZE,
    max_tokens=4096,
)
QUESTIONS: list[Question] = [
    Hello(1),
    DraftRequest(number=3, budget_s=0.0, rows=(), forget=(5, 6)),
    DraftRequest(
        number=4,
        budget_s=0.25,
        rows=(
            TextRow(text=0, salt=2**64 - 1, start=5, tokens=np.array([1, LAST], np.int32)),
            TextRow(
                text=1,
                salt=0,
                start=0,
                tokens=np.array([9], np.int32),
                states_start=2,
                states=np.full((1, HIDDEN_SIZE), 65535, np.uint16),
                max_draft_tokens=128,
            ),
        ),
    ),
]
REPLIES: list[Reply] = [
    Greeting(7, "abc", CARD),
    DraftAnswer(3, (RowAnswer(5), RowAnswer(0, (1, 2)), RowAnswer(7, problem="unfit")), 0.1),
    Refusal(4, "expired"),
]


def rows() -> st.SearchStrategy[TextRow]:
    token = st.integers(0, LAST)
    return st.builds(
        TextRow,
        text=st.integers(0, 2**63 - 1),
        salt=st.integers(0, 2**64 - 1),
        start=st.integers(0, 2**30),
        tokens=st.lists(token, max_size=5).map(lambda ids: np.array(ids, np.int32)),
        states_start=st.integers(0, 2**30),
        states=st.none()
        | st.integers(1, 4).map(
            lambda size: np.arange(size * HIDDEN_SIZE, dtype=np.uint16).reshape(size, HIDDEN_SIZE)
        ),
        max_draft_tokens=st.integers(0, 128),
    )


def requests() -> st.SearchStrategy[DraftRequest]:
    return st.builds(
        DraftRequest,
        number=st.integers(0, 2**63 - 1),
        budget_s=st.floats(0, 3600),
        rows=st.lists(rows(), max_size=4, unique_by=lambda row: row.text).map(tuple),
        forget=st.lists(st.integers(0, 2**63 - 1), max_size=3).map(tuple),
    )


def plain(request: DraftRequest) -> Any:
    """The request without arrays, for comparison."""
    return (
        request.number,
        request.budget_s,
        request.forget,
        [
            (
                (row.text, row.salt, row.start, row.states_start, row.max_draft_tokens),
                row.tokens.tolist(),
                None if row.states is None else row.states.tolist(),
            )
            for row in request.rows
        ],
    )


@given(requests())
def test_a_request_arrives_as_it_was_sent(request: DraftRequest) -> None:
    arrived = decode_question(encode(request))
    assert isinstance(arrived, DraftRequest)
    assert plain(arrived) == plain(request)
    assert all(row.tokens.dtype == np.int32 for row in arrived.rows)


@pytest.mark.parametrize("message", [Hello(1), *REPLIES])
def test_other_messages_are_one_frame_and_arrive_as_sent(message: Any) -> None:
    (frame,) = encode(message)
    decode: Callable[[Sequence[Frame]], object] = (
        decode_question if isinstance(message, Hello) else decode_reply
    )
    assert decode([frame]) == message


def test_rows_of_strided_arrays_are_sent_without_skipped_values() -> None:
    tokens, states = np.arange(20, dtype=np.int32), np.arange(60, dtype=np.uint16).reshape(10, 6)
    row = TextRow(text=1, salt=0, start=0, tokens=tokens[::2], states=states[2:4, ::2])
    arrived = decode_question(encode(DraftRequest(number=1, budget_s=1.0, rows=(row,))))
    assert isinstance(arrived, DraftRequest)
    (received,) = arrived.rows
    assert received.states is not None
    assert received.tokens.tolist() == tokens[::2].tolist()
    assert received.states.tolist() == states[2:4, ::2].tolist()


def test_the_states_of_a_single_row_are_not_copied() -> None:
    states = np.arange(60, dtype=np.uint16).reshape(10, 6)
    row = TextRow(text=1, salt=0, start=0, tokens=np.arange(9, dtype=np.int32), states=states[2:6])
    *_, frame = encode(DraftRequest(number=1, budget_s=1.0, rows=(row,)))
    assert np.shares_memory(np.frombuffer(frame, np.uint16), states)


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_garbage_raises_a_wire_error(frames: list[bytes]) -> None:
    for decode in (decode_question, decode_reply):
        with pytest.raises(WireError):
            decode(frames)


@given(
    st.sampled_from([*QUESTIONS, *REPLIES]),
    st.integers(0, 2),
    st.integers(0, 10_000),
    st.binary(max_size=3),
    st.integers(0, 3),
)
def test_a_damaged_message_is_read_or_raises_a_wire_error(
    message: Any, frame: int, at: int, patch: bytes, removed: int
) -> None:
    frames = [bytes(frame) for frame in encode(message)]
    frame %= len(frames)
    at %= len(frames[frame]) + 1
    frames[frame] = frames[frame][:at] + patch + frames[frame][at + removed :]
    for decode in (decode_question, decode_reply):
        try:
            decode(frames)
        except WireError:
            continue


def damaged(change: Callable[[list[bytes]], object]) -> list[bytes]:
    frames = [bytes(frame) for frame in encode(QUESTIONS[2])]
    change(frames)
    return frames


@pytest.mark.parametrize(
    "frames",
    [
        damaged(lambda frames: frames.pop()),
        damaged(lambda frames: frames.append(b"")),
        damaged(lambda frames: frames.insert(1, frames.pop(1) + b"\0\0\0\0")),
        damaged(lambda frames: frames.insert(2, frames.pop(2)[:-1])),
        damaged(lambda frames: frames.insert(1, b"\xff" * len(frames.pop(1)))),
        [*encode(Hello(1)), b""],
        [b" " * (MAX_HEADER_BYTES + 1)],
        [b"\x94\xa5hello\x01\x01" + b"\x91" * 100_000],
        [],
    ],
)
def test_frames_that_contradict_the_header_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode_question(frames)


def head(**changes: Any) -> bytes:
    """A hand-written header of a request with one row without tokens."""
    row: dict[str, Any] = {
        "salt": 0,
        "start": 0,
        "tokens": 0,
        "first": 0,
        "states": None,
        "draft": 1,
        "text": 1,
    }
    fields: dict[str, Any] = {
        "number": 1,
        "budget_s": 0.1,
        "rows": [row],
        "forget": [],
    }
    for key, value in changes.items():
        (row if key in row else fields)[key] = value
    fields["rows"] = [list(each.values()) for each in fields["rows"]]
    return msgspec.msgpack.encode(["draft", *fields.values()])


def test_a_header_written_by_hand_is_read() -> None:
    assert isinstance(decode_question([head(), b"", b""]), DraftRequest)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"number": -1}, "int` >= 0"),
        ({"budget_s": float("nan")}, "float` >= 0"),
        ({"budget_s": -0.1}, "float` >= 0"),
        ({"budget_s": "soon"}, "got `str`"),
        ({"start": LAST + 1}, f"int` <= {LAST}"),
        ({"start": -1}, "int` >= 0"),
        ({"draft": 129}, "int` <= 128"),
        ({"salt": -1}, "int` >= 0"),
        ({"tokens": MAX_TOKENS + 1}, f": {MAX_TOKENS + 1} tokens"),
        ({"tokens": -1}, "int` >= 0"),
        ({"states": -1}, "int` >= 0"),
        ({"states": 1}, "0 bytes of 1 states"),
        ({"forget": list(range(MAX_ROWS + 1))}, "length <= 4096"),
        ({"rows": [{"text": 1}]}, "at least length 7"),
    ],
)
def test_a_header_with_a_value_out_of_bounds_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(WireError, match=reason):
        decode_question([head(**changes), b"", b""])


def test_two_rows_of_one_text_are_refused() -> None:
    row = [0, 0, 0, 0, None, 1, 1]
    header = msgspec.msgpack.encode(["draft", 1, 0.1, [row, row], []])
    with pytest.raises(WireError, match="two rows"):
        decode_question([header, b"", b""])


@pytest.mark.parametrize(
    "changes", [{"kind": "m" * 4097}, {"vocab_size": -1}, {"hidden_size": MAX_STATE_BYTES}]
)
def test_a_card_with_a_value_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    (frame,) = encode(Greeting(7, "abc", msgspec.structs.replace(CARD, **changes)))
    with pytest.raises(WireError, match="no reply"):
        decode_reply([frame])


def test_an_answer_with_a_negative_token_is_refused() -> None:
    frame = msgspec.msgpack.encode(["drafts", 1, "abc", [[3, [-1]]], 0.0])
    with pytest.raises(WireError):
        decode_reply([frame])


@pytest.mark.parametrize("num_bytes", [2, MAX_STATE_BYTES + 2])
def test_states_that_the_header_does_not_name_are_refused(num_bytes: int) -> None:
    with pytest.raises(WireError, match=f"{num_bytes} bytes of"):
        decode_question([head(), b"", bytes(num_bytes)])
