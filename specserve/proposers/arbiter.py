"""Which source's draft is sent: for each request the one that promises most accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.core.types import Draft, Outcome
from specserve.proposers.acceptance import Acceptance


class Arbiter:
    """Chooses between sources by what was accepted of their drafts.

    All that was offered is learned from, whether and how far it was sent: the target's own text
    tells how far it was right. So no source has to be tried to be known.

    Args:
        acceptance: of the sources' drafts.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._offered: dict[str, Sequence[Draft]] = {}

    def has_offers(self, request_ids: Sequence[str]) -> bool:
        """Whether there are offers to learn from with these requests' next tokens."""
        return any(request_id in self._offered for request_id in request_ids)

    def offers(self, request_id: str) -> Sequence[Draft]:
        """A request's drafts of the last step, sent or not."""
        return self._offered.get(request_id, ())

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

    def keep(self, request_id: str, offers: Sequence[Draft]) -> None:
        """Remembers what was offered, until the request's next tokens are known."""
        if offers:
            self._offered[request_id] = offers
        else:
            self._offered.pop(request_id, None)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learns how far the last offers were right."""
        self._acceptance.begin_step()
        for outcome in outcomes:
            for draft in self._offered.pop(outcome.request_id, ()):
                self._acceptance.observe(outcome.request_id, draft, outcome.new_tokens)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is kept of these requests."""
        for request_id in request_ids:
            self._offered.pop(request_id, None)
