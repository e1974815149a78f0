"""Messages between replicas and the store: batches of records, and the store's replies."""

from __future__ import annotations

import sys
import time
from math import isfinite
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from specserve.core.types import Int32Array

MAX_RECORD_TOKENS = 4096
"""Limit of tokens in a record; longer text is split into several records."""

MAX_NAME_CHARS = 128
"""Longest origin or namespace, in ASCII characters."""

RECORD_OVERHEAD_BYTES = 304
"""Memory of a record besides its tokens and its sequence name: Python objects, numbers and its slot
in a log. A test compares it with what Python allocates."""

MAX_AHEAD_S = 3600.0
"""Seconds that a text's stamp may be in the future; beyond it, the writer's clock is wrong."""

Kind = Literal["text", "purge"]


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A piece of one request's text, or a tombstone, which purges text.

    Attributes:
        origin: the process that wrote it, with another name at each start.
        number: 1, 2, 3 ... for each origin. Origin and number identify a record in the cluster.
        stamp: time of its first token by the writer's clock, in seconds since 1970.
        namespace: namespace of the text, which is never shown to another namespace. A ``purge`` may
            name a tenant's half instead, which covers all namespaces of the tenant.
        kind: ``text``, or ``purge``: forgets the namespace's texts that began up to ``stamp``.
            Clocks of nodes must differ by less than the time from a purge to the next text.
        sequence: the request that the text belongs to, unique in the cluster; empty for a purge.
        start: position of the first token in the request's text. There may be gaps between the
            pieces of a text, because full memories drop records.
        tokens: token ids, int32, little-endian.
        final: whether this piece ends the text.
        began: time at which the whole text began; 0: ``stamp``. A purge also covers the pieces of
            such a text that its replica sends before it has read the purge.
    """

    origin: str
    number: int
    stamp: float
    namespace: str
    kind: Kind = "text"
    sequence: str = ""
    start: int = 0
    tokens: bytes = b""
    final: bool = False
    began: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // 4

    @property
    def num_bytes(self) -> int:
        """Memory of the record in a log, in bytes."""
        return RECORD_OVERHEAD_BYTES + len(self.sequence) + len(self.tokens)

    def token_array(self) -> Int32Array:
        """The token ids, ``[num_tokens]``; a read-only view."""
        return np.frombuffer(self.tokens, dtype="<i4")

    def with_shared_names(self) -> Record:
        """The same record with interned strings: records with equal names share them."""
        return msgspec.structs.replace(
            self,
            origin=sys.intern(self.origin),
            namespace=sys.intern(self.namespace),
            sequence=sys.intern(self.sequence),
        )


def is_ahead(record: Record) -> bool:
    """Whether a text is from the future.

    A purge has at least the stamp of the newest text it covers, whose writer's clock may be fast.
    """
    return record.kind == "text" and record.stamp > time.time() + MAX_AHEAD_S


def problem_of(record: Record, vocab_size: int) -> str:
    """Why the record is invalid; empty if it is valid.

    A token outside the vocabulary would index past the target's embedding.
    """
    for name in (record.origin, record.namespace):
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isascii():
            return f"origin and namespace need 1 .. {MAX_NAME_CHARS} ASCII characters"
    if not (isfinite(record.stamp) and isfinite(record.began)):
        return "its stamp is no time"
    size = len(record.tokens)
    if size % 4 or size > 4 * MAX_RECORD_TOKENS:
        return f"tokens are {size} bytes, not 4 for each of 0 .. {MAX_RECORD_TOKENS} tokens"
    # Read as unsigned, a negative id is a very large one.
    if size and int(np.frombuffer(record.tokens, dtype="<u4").max()) >= vocab_size:
        return f"a token id is not in 0 .. {vocab_size - 1}"
    return ""


class TextPiece(NamedTuple):
    """The next piece of a text to publish; the fields are those of a :class:`Record`.

    Attributes:
        tokens: int32 ``[n]``, of any length.
        stamp: 0 means now.
    """

    namespace: str
    sequence: str
    start: int
    tokens: Int32Array
    final: bool = False
    stamp: float = 0.0
    began: float = 0.0


def records_of(origin: str, first_number: int, piece: TextPiece) -> list[Record]:
    """Splits a piece of a text into records, numbered from ``first_number``; copies the tokens."""
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
                piece.final and begin + len(tokens) == num_tokens,
                piece.began,
            )
        )
    return records


Ranges = dict[str, list[tuple[int, int]]]
"""Record numbers by origin, as inclusive ranges (first, last)."""


class ExchangeRequest(msgspec.Struct, frozen=True, array_like=True):
    """A replica's call: sends records to the store, and reads on in its log.

    Attributes:
        origin: the replica; the reply leaves out its own records.
        epoch: the store's epoch that the replica knows; empty before the first reply.
        position: position in that epoch's log to read from.
        records: records that the store may lack.
        max_bytes: bytes of records in the reply, which may exceed it by one record.
    """

    origin: str
    epoch: str
    position: int
    records: list[Record]
    max_bytes: int


class ExchangeReply(msgspec.Struct, frozen=True, array_like=True):
    """The store's reply, after it has processed all records of the request.

    Attributes:
        epoch: identity of the store, new at each start.
        position: position to read from next.
        records: other replicas' records, in log order.
        behind: how many positions of the log are left to read.
        held: numbers of the store's records, with those of the request. Sent only to a caller that
            did not know the epoch: the store lacks all other records.
        refused: why the store refuses the caller; empty if it does not.
        log_bytes: limit of the store's log in bytes, set by the application that started the store.
        is_alone: whether nobody else has called for some seconds.
        newest_purge: latest stamp of a purge that the store has taken; 0: there was none.
    """

    epoch: str
    position: int = 0
    records: list[Record] = []
    behind: int = 0
    held: Ranges = {}
    refused: str = ""
    log_bytes: int = 0
    is_alone: bool = False
    newest_purge: float = 0.0


class StoreClient(Protocol):
    """A replica's connection to the store."""

    def exchange(self, request: ExchangeRequest, timeout_s: float) -> ExchangeReply:
        """Sends records and returns those of others. It is safe to repeat a call.

        Raises:
            StoreError: no answer within ``timeout_s`` seconds, or no store.
        """
        ...
