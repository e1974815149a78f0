"""What a drafter's server asks of a model, and what it answers: rows of text, drafts back.

A row always says from which position on its text counts. So sending it twice does no harm, rolling
refused drafts back needs no message, and a drafter that has forgotten a text says how much of it
it holds, and is sent the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specserve.wire.messages import Problem, TextUpdate

ALL_TOKENS = 1 << 31
"""More than any text has."""

Key = tuple[bytes, int]
"""A text's name: the client's, and the client's own number for it."""


class Row(TextUpdate, frozen=True, kw_only=True):
    """One text of a call.

    Attributes:
        key: whose text it is.
        max_feed_tokens: most positions that this call may compute before the draft. With fewer
            than the text lacks the answer says how far it came, and nothing is drafted.
    """

    key: Key
    max_feed_tokens: int = ALL_TOKENS

    @property
    def num_tokens(self) -> int:
        """Length of the whole text."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a row.

    Attributes:
        held: how many positions, from the first one on, need not be sent again; the next row of
            this text starts there or before. Less than ``row.start``: the text was forgotten, and
            nothing was drafted.
        tokens: the draft; empty: none.
        chances: the model's own probability of each of its tokens. They are not compared: a last
            bit depends on what a row was batched with.
        begin: first position that it drafts from; later than 0 where it lacks those before and was
            not sent what it needs of them.
        problem: why nothing came of the row; a server's to say, not a model's.
    """

    held: int
    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = field(default=(), compare=False)
    begin: int = 0
    problem: Problem = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a drafter tells of itself, for a client to see whether it fits its target.

    Attributes:
        kind: ``draft_model`` or ``mtp``.
        model: the checkpoint's path, for messages.
        vocab_size: drafted tokens are 0 .. ``vocab_size - 1``.
        tokenizer: hash of the vocabulary, :func:`specserve.drafters.vocabulary.fingerprint`; empty:
            unknown.
        hidden_size: width of the hidden states it wants; 0: none.
        max_tokens: longest text in tokens.
    """

    kind: str
    model: str
    vocab_size: int
    tokenizer: str
    hidden_size: int
    max_tokens: int


class Drafter(Protocol):
    """A model that drafts. All calls come from one thread."""

    @property
    def card(self) -> Card:
        """What it is."""
        ...

    def draft(self, rows: Sequence[Row]) -> list[Answer]:
        """Brings every row's text up to date in one forward, and drafts for the rows that want it.

        Drafts are greedy, so that the same text gives the same draft whatever it is batched with.

        Args:
            rows: n, each of another key; tokens and states are as the card says, which the caller
                has checked.

        Returns:
            n answers. A row that cannot be served (its text too long, no place for it) is
            answered with what is held of it and no draft; it raises nothing.
        """
        ...

    def forget(self, keys: Sequence[Key]) -> None:
        """These texts have ended; unknown keys are fine."""
        ...
