"""What a source that takes time might bring to each request: a new draft, or more of another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from specserve.core.types import ANY_DRAFT, Draft, Source
from specserve.proposers.acceptance import Acceptance

MOST_SERIAL = 4
"""Tokens of another's draft that are gone through one by one, each by a forward, at most."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """A draft that a request might get.

    Attributes:
        held: chances of acceptance of what it continues; empty: it begins at the text's end.
        own: the same of its own tokens; at least one.
        num_before: forwards before that of its first own token.
        continued: what it continues.
    """

    held: list[float]
    own: list[float]
    num_before: int = 0
    continued: Draft | None = None

    def num_own(self, num_forwards: int) -> int:
        """Its own tokens, of so many forwards."""
        return min(max(num_forwards - self.num_before, 0), len(self.own))

    def chances(self, num_forwards: int) -> list[float]:
        """Of all its tokens, if the source has so many forwards."""
        return self.held + self.own[: self.num_own(num_forwards)]


class Prospects:
    """Tells them for one kind of source, by what became of its drafts before.

    Args:
        kind: of the source.
        acceptance: of the sources' drafts.
        longest: its longest draft.
        is_serial: whether it takes a forward for each token that it continues, as for its own.
    """

    def __init__(self, kind: str, acceptance: Acceptance, longest: int, is_serial: bool) -> None:
        self._kind = cast(Source, kind)
        self._acceptance = acceptance
        self._longest = longest
        self._is_serial = is_serial
        self._guesses: dict[tuple[int, bool], Draft] = {}

    def best(self, request_id: str, offers: Sequence[Draft]) -> tuple[Draft | None, list[float]]:
        """The draft that promises most of those that there are, with its tokens' chances."""
        gains = self._acceptance.gains
        judged = ((draft, gains(request_id, draft)) for draft in offers)
        return max(judged, key=lambda pair: sum(pair[1]), default=(None, []))

    def room_behind(self, limit: int, draft: Draft | None, held: list[float]) -> int:
        """How much could be added to a draft; 0: nothing, or it is unlikely to be right so far."""
        if draft is None or len(held) < len(draft.tokens):
            return 0
        if self._is_serial and len(held) > MOST_SERIAL:
            return 0
        return max(0, min(limit - len(held), self._longest))

    def num_before(self, draft: Draft) -> int:
        """Forwards that going through another's draft takes, before one that gives a token."""
        return len(draft.tokens) if self._is_serial else 0

    def of(
        self, request_id: str, room: int, room_behind: int, draft: Draft | None, held: list[float]
    ) -> list[Prospect]:
        """Those that promise more than the draft that there is: a new one, then one behind it.

        Args:
            request_id: whose.
            room: longest new draft.
            room_behind: of :meth:`room_behind`.
            draft: that there is.
            held: its tokens' chances.
        """
        gains, found = self._acceptance.gains, []
        if room > sum(held) and sum(new := gains(request_id, self._guess(room))) > sum(held):
            found.append(Prospect([], new))
        if room_behind and draft is not None:
            chances = gains(request_id, self._guess(room_behind, is_behind=True))
            if own := [held[-1] * chance for chance in chances]:
                found.append(Prospect(held, own, self.num_before(draft), draft))
        return found

    def _guess(self, length: int, *, is_behind: bool = False) -> Draft:
        """A draft of this source, of which only the length is known; always the same one."""
        guess = self._guesses.get((length, is_behind))
        if guess is None:
            guess = Draft((0,) * length, self._kind, continues=ANY_DRAFT if is_behind else None)
            self._guesses[length, is_behind] = guess
        return guess
