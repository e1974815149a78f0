"""Messages as lists of frames: a header in MessagePack, and raw tensors.

A request for drafts has three frames: its header with arrays replaced by their lengths, all rows'
tokens as int32, and all rows' hidden states as bfloat16 bits. Both arrays are without gaps and in
the rows' order. Other messages have one frame. Numbers are little-endian. Decoding executes
nothing, and reads arrays only after all sizes have been checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from specserve.core.errors import WireError, shorten
from specserve.wire.messages import (
    LAST,
    MAX_ROWS,
    MAX_STATE_BYTES,
    MAX_TOKENS,
    DraftRequest,
    Hello,
    Question,
    Reply,
    RequestHead,
    TextRow,
)

MAX_HEADER_BYTES = 1 << 20
"""Limit of a header; ``MAX_ROWS`` rows, or their answer with usual draft lengths, take less."""

MAX_FRAME_BYTES = max(MAX_HEADER_BYTES, 4 * MAX_TOKENS, MAX_STATE_BYTES)
"""Largest frame that a socket must accept."""

Frame = bytes | memoryview
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder(enc_hook=len)  # arrays become their lengths
_question: msgspec.msgpack.Decoder[Hello | RequestHead]
_question = msgspec.msgpack.Decoder(Hello | RequestHead)
_reply: msgspec.msgpack.Decoder[Reply]
_reply = msgspec.msgpack.Decoder(Reply)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(message: Question | Reply) -> list[Frame]:
    """The frames of a message; the frame of states may be a view of a single row's array."""
    header = _encoder.encode(message)
    if not isinstance(message, DraftRequest):
        return [header]
    rows = message.rows
    tokens = _joined([row.tokens for row in rows], "<i4")
    states = _joined([row.states for row in rows if row.states is not None], "<u2")
    assert len(rows) <= MAX_ROWS
    assert len(message.forget) <= MAX_ROWS
    assert len(tokens) <= MAX_TOKENS
    assert states.nbytes <= MAX_STATE_BYTES
    return [header, tokens.tobytes(), _bytes_of(states)]


def decode_question(frames: Sequence[Frame]) -> Question:
    """Decodes a message to a drafter; the rows' arrays are views of the frames.

    Raises:
        WireError: it is malformed or too large.
    """
    head = _decoded(_question, frames, "question")
    if isinstance(head, RequestHead):
        return _request(head, frames)
    _expect(len(frames) == 1, f"{len(frames)} frames instead of 1")
    return head


def decode_reply(frames: Sequence[Frame]) -> Reply:
    """Decodes a message to a replica.

    Raises:
        WireError: it is malformed or too large.
    """
    _expect(len(frames) == 1, f"{len(frames)} frames instead of 1")
    return _decoded(_reply, frames, "reply")


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: str) -> npt.NDArray[Any]:
    """Concatenates arrays in the type that is sent; a lone array, perhaps large, is not copied."""
    if not arrays:
        return np.empty(0, dtype)
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return joined.astype(dtype, copy=False)


def _bytes_of(array: npt.NDArray[Any]) -> Frame:
    """The array's bytes, copied only if it is not contiguous."""
    return np.ascontiguousarray(array).data.cast("B") if array.size else b""


def _decoded(decoder: msgspec.msgpack.Decoder[T], frames: Sequence[Frame], kind: str) -> T:
    _expect(bool(frames), "no frames")
    _expect(len(frames[0]) <= MAX_HEADER_BYTES, f"a header of {len(frames[0])} bytes")
    try:
        return decoder.decode(frames[0])
    except _UNREADABLE as error:
        raise WireError(f"no {kind}: {shorten(str(error), 200)}") from None


def _request(head: RequestHead, frames: Sequence[Frame]) -> DraftRequest:
    _expect(len(frames) == 3, f"{len(frames)} frames instead of 3")
    _expect(len({row.text for row in head.rows}) == len(head.rows), "a text with two rows")
    num_tokens = sum(row.num_tokens for row in head.rows)
    counts = [row.num_states or 0 for row in head.rows]
    num_states, state_bytes = sum(counts), len(frames[2])
    width, rest = divmod(state_bytes, 2 * max(num_states, 1))
    _expect(num_tokens <= MAX_TOKENS, f"{num_tokens} tokens")
    _expect(len(frames[1]) == 4 * num_tokens, f"{len(frames[1])} bytes of {num_tokens} tokens")
    _expect(state_bytes <= MAX_STATE_BYTES, f"{state_bytes} bytes of states")
    is_whole = not rest and (width > 0) == (num_states > 0)
    _expect(is_whole, f"{state_bytes} bytes of {num_states} states")
    tokens = np.frombuffer(frames[1], "<i4")
    states = np.frombuffer(frames[2], "<u2").reshape(num_states, width)
    _expect(not num_tokens or int(tokens.min()) >= 0, "a token id below 0")
    ends = [row.start + row.num_tokens for row in head.rows]
    _expect(max(ends, default=0) <= LAST, "a text that is too long")
    ends = [row.states_start + count for row, count in zip(head.rows, counts, strict=True)]
    _expect(max(ends, default=0) <= LAST, "states beyond any text")
    rows, token, state = [], 0, 0
    for row, count in zip(head.rows, counts, strict=True):
        rows.append(
            TextRow(
                text=row.text,
                salt=row.salt,
                start=row.start,
                tokens=tokens[token : token + row.num_tokens],
                states_start=row.states_start,
                states=states[state : state + count] if count else None,
                max_draft_tokens=row.max_draft_tokens,
            )
        )
        token += row.num_tokens
        state += count
    return DraftRequest(
        number=head.number, budget_s=head.budget_s, rows=tuple(rows), forget=head.forget
    )


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise WireError(f"malformed or too large: {otherwise}")
