"""What replicas and the store tell each other: records of text, in batches, and their answers."""

from __future__ import annotations

import sys
import time
from math import isfinite
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from specserve.core.types import Int32Array

MAX_RECORD_TOKENS = 4096
"""Longer text travels as several records."""

MAX_NAME_CHARS = 128
"""Longest origin or namespace, in ASCII characters."""

RECORD_OVERHEAD_BYTES = 288
"""Memory of a record beside its tokens and its sequence's characters: the objects, its numbers and
its place in a log. A test holds it against what Python allocates."""

MAX_AHEAD_S = 3600.0
"""A stamp further in the future is a broken clock."""

Kind = Literal["text", "purge"]


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A piece of one request's text, or a tombstone, which says what to forget.

    Attributes:
        origin: who wrote it; unique for each start of a process.
        number: 1, 2, 3 ... for each origin: with it, the record's identity in the cluster.
        stamp: when its first token was written, in seconds since 1970 by the writer's clock.
        namespace: whose text it is. Text of one namespace is never shown to another. A ``purge``
            may name a tenant's half, and so all namespaces of the tenant.
        kind: ``text``; ``purge`` forgets the namespace, as far as it was written up to ``stamp``.
            So nodes' clocks have to agree, within the time that may pass between a purge and the
            next text that counts.
        sequence: the request whose text this is; unique in the cluster. Of a purge empty.
        start: position of the first token in the request's text. The pieces of a text may come
            with gaps between them, since memory is bounded everywhere.
        tokens: token ids, int32, little-endian.
        num_prompt_tokens: how many of the first tokens belong to the prompt; the others are output.
        final: the text ends here.
    """

    origin: str
    number: int
    stamp: float
    namespace: str
    kind: Kind = "text"
    sequence: str = ""
    start: int = 0
    tokens: bytes = b""
    num_prompt_tokens: int = 0
    final: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // 4

    @property
    def num_bytes(self) -> int:
        """Memory that it takes in a log, in bytes."""
        return RECORD_OVERHEAD_BYTES + len(self.sequence) + len(self.tokens)

    def token_array(self) -> Int32Array:
        """The token ids, ``[num_tokens]``; a read-only view."""
        return np.frombuffer(self.tokens, dtype="<i4")

    def with_shared_names(self) -> Record:
        """The same record, its names shared with all records that have the same ones."""
        return msgspec.structs.replace(
            self,
            origin=sys.intern(self.origin),
            namespace=sys.intern(self.namespace),
            sequence=sys.intern(self.sequence),
        )


def problem_of(record: Record, vocab_size: int) -> str:
    """Why the record must not be taken, in words; empty: it is well formed.

    A token outside the vocabulary would be looked up outside of the target's embedding.
    """
    for name in (record.origin, record.namespace):
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isascii():
            return f"origin and namespace need 1 .. {MAX_NAME_CHARS} ASCII characters"
    # A purge is as new as the newest text that it is about, whose clock may have been fast.
    is_ahead = record.kind == "text" and record.stamp > time.time() + MAX_AHEAD_S
    if not isfinite(record.stamp) or is_ahead:
        return "its stamp is no time, or in the future: compare the nodes' clocks"
    size = len(record.tokens)
    if size % 4 or size > 4 * MAX_RECORD_TOKENS:
        return f"tokens are {size} bytes, not 4 for each of 0 .. {MAX_RECORD_TOKENS} tokens"
    # Read as unsigned, a negative id is a very large one.
    if size and int(np.frombuffer(record.tokens, dtype="<u4").max()) >= vocab_size:
        return f"a token id is not in 0 .. {vocab_size - 1}"
    return ""


class TextPiece(NamedTuple):
    """What follows in a text, as it is published; the fields are those of a :class:`Record`.

    Attributes:
        tokens: int32 ``[n]``, of any length.
        stamp: 0: now.
    """

    namespace: str
    sequence: str
    start: int
    tokens: Int32Array
    num_prompt_tokens: int = 0
    final: bool = False
    stamp: float = 0.0


def records_of(origin: str, first_number: int, piece: TextPiece) -> list[Record]:
    """A piece of a text as records, numbered from ``first_number`` on; the tokens are copied."""
    records: list[Record] = []
    stamp, num_tokens = piece.stamp or time.time(), len(piece.tokens)
    for begin in range(0, max(1, num_tokens), MAX_RECORD_TOKENS):
        tokens = piece.tokens[begin : begin + MAX_RECORD_TOKENS]
        records.append(
            Record(
                origin,
                first_number + len(records),
                stamp,
                piece.namespace,
                "text",
                piece.sequence,
                piece.start + begin,
                np.asarray(tokens, "<i4").tobytes(),
                max(0, min(piece.num_prompt_tokens - begin, len(tokens))),
                piece.final and begin + len(tokens) == num_tokens,
            )
        )
    return records


Ranges = dict[str, list[tuple[int, int]]]
"""Numbers of records by origin, as ranges from first to last."""


class ExchangeRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a replica tells the store.

    Attributes:
        fingerprint: identity of the model and tokenizer whose tokens these are.
        origin: the replica; it is not told its own records.
        epoch: the store's epoch as far as the replica knows; empty: none yet.
        position: where in that epoch's log the replica goes on reading.
        records: what the store may not have.
        max_bytes: how much the answer may carry.
    """

    fingerprint: str
    origin: str
    epoch: str
    position: int
    records: list[Record]
    max_bytes: int


class ExchangeReply(msgspec.Struct, frozen=True, array_like=True):
    """What the store answers; all records of the request have been dealt with.

    Attributes:
        epoch: identity of this start of the store.
        position: where to go on reading.
        records: others' records, in the log's order.
        behind: how many positions of the log are left to read.
        held: the store's records by number, those of the request included. Only for a caller that
            did not know the epoch: what it has beyond these, the store has lost.
        refused: why the store will have nothing to do with the caller; empty: it is welcome.
        log_bytes: what the store's log may hold, in bytes: the application that started it decides.
        is_alone: whether nobody but the caller has asked for some seconds.
    """

    epoch: str
    position: int = 0
    records: list[Record] = []
    behind: int = 0
    held: Ranges = {}
    refused: str = ""
    log_bytes: int = 0
    is_alone: bool = False


class StoreClient(Protocol):
    """A replica's way to the store."""

    def exchange(self, request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        """Hands over records and gets others'. Asking twice does no harm.

        Raises:
            StoreError: no answer within ``timeout_s`` seconds, or no store.
        """
        ...
