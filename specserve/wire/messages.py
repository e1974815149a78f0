"""What a replica and a drafter tell each other.

A replica asks; every question has a number of the asker's own, which its answer repeats. Texts
have numbers too, again the asker's own: who asks is told by the connection.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy.typing as npt

from specserve.core.source_config import MAX_DRAFT_TOKENS
from specserve.core.types import Int32Array

PROTOCOL = 5
"""Raised with every change that another side would misread; a part of the drafters' names."""

MAX_ROWS = 4096
"""Rows, or texts to forget, of a request; an engine decodes fewer requests in a step."""

MAX_TOKENS = 1 << 20
"""Tokens of a request, of all rows together: one text as long as contexts get, or many short."""

MAX_STATE_BYTES = 128 << 20
"""Hidden states of a request: 4096 of 16384 values."""

LAST = (1 << 31) - 1
"""Positions in a text, and token ids, are at most this."""

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Position = Annotated[int, msgspec.Meta(ge=0, le=LAST)]
Width = Annotated[int, msgspec.Meta(ge=0, le=MAX_STATE_BYTES // 2)]
Name = Annotated[str, msgspec.Meta(max_length=4096)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Who are you, and are you there? Answered by a :class:`Card`.

    The answer comes behind what was being computed, so that it is late where drafts would be.

    Attributes:
        replica: for whom is asked; empty: nobody's.
    """

    number: Number
    replica: Name = ""


class Card(msgspec.Struct, frozen=True, array_like=True, tag="card"):
    """What a drafter is; :class:`specserve.drafters.base.Card` says more of the last six.

    Attributes:
        instance: the process's random name; another one means that all texts are forgotten.
    """

    number: Number
    instance: Name
    kind: Name
    model: Name
    vocab_size: Position
    tokenizer: Name
    hidden_size: Width
    max_tokens: Position


class RowHead(msgspec.Struct, frozen=True, array_like=True):
    """A :class:`TextRow` as its header tells it: an array by its length."""

    salt: Annotated[int, msgspec.Meta(ge=0)]
    start: Position
    num_tokens: Position
    states_start: Position
    num_states: Position | None
    max_draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAFT_TOKENS)]
    text: Number


class RequestHead(msgspec.Struct, frozen=True, array_like=True, tag="draft"):
    """A :class:`DraftRequest` as its header tells it."""

    number: Number
    budget_s: Seconds
    rows: Annotated[tuple[RowHead, ...], msgspec.Meta(max_length=MAX_ROWS)]
    forget: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_ROWS)]


class TextUpdate(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What is new of a text, and how long a draft of it is wanted.

    Attributes:
        salt: 0 .. 2**64 - 1; texts of different salts share nothing, not even a common beginning.
        start: position of the first of ``tokens``; what was held from there on is dropped.
        tokens: int32 ``[m]``, the text from ``start`` to its end.
        states_start: position of the first of ``states``.
        states: ``[s, hidden_size]``, the target's last hidden states after the final norm, of
            positions ``states_start ..``; uint16 holds the bits of bfloat16, and nothing else is
            sent; of one type in all rows of a call; None: none.
        max_draft_tokens: longest draft; 0: the text is only to be remembered.
    """

    salt: int
    start: int
    tokens: Int32Array
    states_start: int = 0
    states: npt.NDArray[Any] | None = None
    max_draft_tokens: int = 0


class TextRow(TextUpdate, frozen=True, kw_only=True, array_like=True):
    """One text of a request, by the asker's number for it."""

    text: int

    @property
    def num_computed(self) -> int:
        """Positions that a drafter computes which holds what is before; gaps of states are none."""
        return self.start + len(self.tokens) - max(self.start, self.states_start)


class DraftRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="draft"):
    """Bring these texts up to date, draft for those that want it.

    Attributes:
        budget_s: how long the answer is of use, in seconds from when the drafter reads the request:
            after the call of its model that runs when it comes.
        rows: each of another text; their states are of one width.
        forget: texts that have ended.
    """

    number: int
    budget_s: float
    rows: tuple[TextRow, ...]
    forget: tuple[int, ...] = ()


Problem = Literal["", "failed", "unfit"]
"""Why nothing came of a row. Failed: the model raised; unfit: a token of the text is beyond its
vocabulary, or a state is not the model's."""


class RowAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What became of a row; see :class:`specserve.drafters.base.Answer`. Chances in 255ths."""

    held: Position
    tokens: Annotated[tuple[Position, ...], msgspec.Meta(max_length=MAX_DRAFT_TOKENS)] = ()
    chances: Annotated[bytes, msgspec.Meta(max_length=MAX_DRAFT_TOKENS)] = b""
    begin: Position = 0
    problem: Problem = ""


class DraftAnswer(msgspec.Struct, frozen=True, array_like=True, tag="drafts"):
    """A request's answers, one for each row, in the request's order.

    Attributes:
        compute_s: how long it was computed, in seconds, together with what else was waiting.
    """

    number: Number
    rows: Annotated[tuple[RowAnswer, ...], msgspec.Meta(max_length=MAX_ROWS)]
    compute_s: Seconds


Reason = Literal["expired", "failed", "crowded"]
"""Why there is no answer: its time was over, the model raised, or the client has too much waiting
already."""


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """A request was dropped; what is held of its texts is not known."""

    number: Number
    reason: Reason


Question = Hello | DraftRequest
Reply = Card | DraftAnswer | Refusal
