"""The interface between a drafter's server and its model: rows of text in, drafts out.

Every row says at which position its tokens start. So a row may be sent twice, and rejected drafts
are rolled back without a message. A drafter that has forgotten a part of a text answers how much
it holds, and is then sent the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specserve.wire.messages import Card, Problem, TextUpdate

ALL_TOKENS = 1 << 31
"""More tokens than any text has."""

Key = tuple[bytes, int]
"""Identifies a text: the client's name, and the client's number for the text."""


class Row(TextUpdate, frozen=True, kw_only=True):
    """One text of a call.

    Attributes:
        key: identifies the text.
        max_feed_tokens: most positions that this call may compute before the draft. If the text
            needs more, nothing is drafted, and the answer says how far the call came.
    """

    key: Key
    max_feed_tokens: int = ALL_TOKENS

    @property
    def num_tokens(self) -> int:
        """Length of the whole text."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a row.

    Attributes:
        held: number of leading positions that need not be sent again; the text's next row starts
            there or earlier. Less than ``row.start``: the text was forgotten, and nothing was
            drafted.
        tokens: the draft; empty: none.
        chances: the model's probability of each draft token. Equality ignores them, because their
            last bits depend on the other rows of the batch.
        begin: first position that the draft is based on; above 0 if the drafter was not sent what
            it needs of earlier positions.
        problem: why the row brought nothing; set by the server, never by the model.
    """

    held: int
    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = field(default=(), compare=False)
    begin: int = 0
    problem: Problem = ""


class Drafter(Protocol):
    """A model that drafts. All calls come from one thread."""

    @property
    def card(self) -> Card:
        """Describes this drafter."""
        ...

    def draft(self, rows: Sequence[Row]) -> list[Answer]:
        """Computes all new tokens in one forward pass, then drafts for the rows that want it.

        Drafts are greedy: the same text gives the same draft in any batch.

        Args:
            rows: n rows with different keys. The caller has checked tokens and states against the
                card.

        Returns:
            n answers. A row that cannot be served (text too long, no free slot) raises nothing: its
            answer has no draft and says what is held.
        """
        ...

    def forget(self, keys: Sequence[Key]) -> None:
        """Forgets texts that have ended; ignores unknown keys."""
        ...
