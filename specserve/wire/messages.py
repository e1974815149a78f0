"""The messages between a replica and a drafter.

The replica numbers its messages, and each answer repeats the number. It numbers its texts as well.
The connection identifies the replica.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy.typing as npt

from specserve.core.source_config import MAX_DRAFT_TOKENS
from specserve.core.types import Int32Array

PROTOCOL = 6
"""Raised with every incompatible change; a part of the drafters' actor names."""

MAX_ROWS = 4096
"""Most rows, or texts to forget, of a request; an engine decodes fewer requests in a step."""

MAX_TOKENS = 1 << 20
"""Most tokens of a request, all rows together: one text of the longest context, or many short."""

MAX_STATE_BYTES = 128 << 20
"""Most bytes of a request's hidden states: 4096 states of 16384 values."""

LAST = (1 << 31) - 1
"""Largest position in a text, and largest token id."""

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Position = Annotated[int, msgspec.Meta(ge=0, le=LAST)]
Width = Annotated[int, msgspec.Meta(ge=0, le=MAX_STATE_BYTES // 2)]
Name = Annotated[str, msgspec.Meta(max_length=4096)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Asks whether the drafter is alive, and what it is; answered by a :class:`Greeting`.

    The drafter answers between model calls, so the answer is late when drafts would be late.

    Attributes:
        replica: the replica that asks; empty: none, so no seat is kept.
    """

    number: Number
    replica: Name = ""


class Card(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Describes a drafter, so that a client can check whether it fits the target.

    Attributes:
        kind: ``draft_model`` or ``mtp``.
        model: the checkpoint's path or hub id, for messages.
        vocab_size: draft tokens are 0 .. ``vocab_size - 1``.
        tokenizer: hash of the vocabulary, :func:`specserve.drafters.vocabulary.fingerprint`; empty:
            unknown.
        hidden_size: width of the hidden states that it needs; 0: none.
        max_tokens: longest text in tokens.
    """

    kind: Name
    model: Name
    vocab_size: Position
    tokenizer: Name
    hidden_size: Width
    max_tokens: Position


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    """Answers a :class:`Hello`.

    Attributes:
        instance: random name of the process; if it changes, all texts have been forgotten.
    """

    number: Number
    instance: Name
    card: Card


class RowHead(msgspec.Struct, frozen=True, array_like=True):
    """A :class:`TextRow` in a header, with arrays replaced by their lengths."""

    salt: Annotated[int, msgspec.Meta(ge=0)]
    start: Position
    num_tokens: Position
    states_start: Position
    num_states: Position | None
    max_draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAFT_TOKENS)]
    text: Number


class RequestHead(msgspec.Struct, frozen=True, array_like=True, tag="draft"):
    """The header of a :class:`DraftRequest`."""

    number: Number
    budget_s: Seconds
    rows: Annotated[tuple[RowHead, ...], msgspec.Meta(max_length=MAX_ROWS)]
    forget: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_ROWS)]


class TextUpdate(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The new part of a text, and the longest draft that is wanted.

    Attributes:
        salt: 0 .. 2**64 - 1; texts with different salts share nothing, not even a common prefix.
        start: position of the first of ``tokens``; entries held from there on are dropped.
        tokens: int32 ``[m]``, the text from ``start`` to its end.
        states_start: position of the first of ``states``.
        states: ``[s, hidden_size]``, the target's last hidden states after the final norm, of
            positions ``states_start ..``; None: none. uint16 holds bfloat16 bits, the only type
            that is sent. All rows of a call have the same type.
        max_draft_tokens: longest draft; 0: the text is only remembered.
    """

    salt: int
    start: int
    tokens: Int32Array
    states_start: int = 0
    states: npt.NDArray[Any] | None = None
    max_draft_tokens: int = 0


class TextRow(TextUpdate, frozen=True, kw_only=True, array_like=True):
    """One text of a request, with the replica's number for it."""

    text: int

    @property
    def num_computed(self) -> int:
        """Positions to compute if all before ``start`` is held; gaps without states are skipped."""
        return self.start + len(self.tokens) - max(self.start, self.states_start)


class DraftRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="draft"):
    """Asks to update these texts, and to draft for those that want it.

    Attributes:
        budget_s: seconds after which the answer is of no use. They start when the drafter reads the
            request, which is after its current model call.
        rows: one per text; all states have the same width.
        forget: texts that have ended.
    """

    number: int
    budget_s: float
    rows: tuple[TextRow, ...]
    forget: tuple[int, ...] = ()


Problem = Literal["", "failed", "unfit"]
"""Why a row brought nothing. Failed: the model raised; unfit: a token is beyond the vocabulary, or
the states have a wrong width."""


class RowAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The result of a row; see :class:`specserve.drafters.base.Answer`. Chances in 255ths."""

    held: Position
    tokens: Annotated[tuple[Position, ...], msgspec.Meta(max_length=MAX_DRAFT_TOKENS)] = ()
    chances: Annotated[bytes, msgspec.Meta(max_length=MAX_DRAFT_TOKENS)] = b""
    begin: Position = 0
    problem: Problem = ""


class DraftAnswer(msgspec.Struct, frozen=True, array_like=True, tag="drafts"):
    """A request's answers, one for each row, in the request's order.

    Attributes:
        compute_s: duration in seconds of the model calls it took part in, with other requests.
    """

    number: Number
    rows: Annotated[tuple[RowAnswer, ...], msgspec.Meta(max_length=MAX_ROWS)]
    compute_s: Seconds


Reason = Literal["expired", "failed", "crowded"]
"""Why a request was dropped: its time budget was over, the model raised, or the client has too
much waiting."""


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """A request was dropped; how much the drafter holds of its texts is unknown."""

    number: Number
    reason: Reason


Question = Hello | DraftRequest
Reply = Greeting | DraftAnswer | Refusal
