"""Which source's draft is sent: for each request the one that promises most accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.core.types import Draft, Outcome
from specserve.proposers.acceptance import Acceptance


class Arbiter:
    """Chooses between sources by what was accepted of their drafts.

    A draft that was not sent is learned from as well: the target's own text tells how far it
    would have been accepted. So no source has to be tried to be known.

    Args:
        acceptance: what was accepted of the drafts that were sent; whoever sends them counts
            those.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._unsent: dict[str, list[Draft]] = {}

    def choose(self, request_id: str, offers: Sequence[Draft]) -> int:
        """Index of the best of one request's drafts; of equals the first.

        Args:
            request_id: whose drafts.
            offers: at least one, each with tokens.
        """
        if len(offers) == 1:
            return 0
        expected = [self._acceptance.expected(request_id, draft) for draft in offers]
        return expected.index(max(expected))

    def keep_unsent(self, request_id: str, drafts: list[Draft]) -> None:
        """Remembers what was offered and not sent, until the request's next tokens are known."""
        if drafts:
            self._unsent[request_id] = drafts
        else:
            self._unsent.pop(request_id, None)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learns what would have become of the drafts that were not sent."""
        for outcome in outcomes:
            for draft in self._unsent.pop(outcome.request_id, ()):
                self._acceptance.observe_unsent(outcome.request_id, draft, outcome.new_tokens)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is kept of these requests."""
        for request_id in request_ids:
            self._unsent.pop(request_id, None)
