"""How likely each token of a draft is to be accepted: by source, match and position, by request."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.core.types import Draft, Outcome

MATCH_BUCKETS = 9
"""Match lengths 0 .. 7 and longer."""

POSITION_BUCKETS = 8
"""Draft positions 1 .. 7 and later."""

LEAST_LIKELY = 0.01
"""Tokens below this chance are never drafted: not even an idle GPU verifies for nothing."""

_MOST_LIKELY = 0.97
_PRIOR_TRIALS = 4.0
_MOST_TRIALS = 1024.0
_REQUEST_PRIOR = 4.0
_REQUEST_MEMORY = 0.97


class Acceptance:
    """Estimates ``P(token j accepted | tokens before j accepted)``.

    Shared by a tenant's requests: one rate for each source, match length and position, from decayed
    counts; what is accepted of one tenant's drafts does not change another's. Each request moves
    a source's rates by one factor: the tokens that it accepted over the tokens that the shared
    rates expected of that source's recent drafts.
    """

    def __init__(self) -> None:
        self._shared: dict[tuple[str, str], list[_Rates]] = {}
        self._tenants: dict[str, str] = {}
        self._requests: dict[str, dict[str, _Record]] = {}

    def assign(self, request_id: str, tenant: str) -> None:
        """Says whose request it is; one of which nothing was said is nobody's."""
        self._tenants[request_id] = tenant

    def observe(self, outcome: Outcome) -> None:
        """Counts the verified draft of an outcome: its tokens up to the first refused one."""
        draft = outcome.draft
        if draft is None or not draft.tokens:
            return
        records = self._requests.setdefault(outcome.request_id, {})
        record = records.get(draft.source)
        if record is None:
            record = records[draft.source] = _Record()
        shared = self._rates_of(outcome.request_id, draft)
        num_hits = outcome.num_accepted
        for index in range(min(num_hits + 1, len(draft.tokens))):
            position = min(index, POSITION_BUCKETS - 1)
            record.add(shared.rates[position], index < num_hits)
            shared.add(position, index < num_hits)

    def observe_unsent(self, request_id: str, draft: Draft, new_tokens: Sequence[int]) -> None:
        """Counts a draft that was not verified, by what the target wrote instead.

        Its tokens count as far as the target's text is known: what agrees would have been
        accepted. For a sampled text this is so with the right probability, too.

        Args:
            request_id: whose it was.
            draft: of the step before.
            new_tokens: what the target wrote in this step.
        """
        num_known = min(len(draft.tokens), len(new_tokens))
        num_hits = 0
        while num_hits < num_known and draft.tokens[num_hits] == new_tokens[num_hits]:
            num_hits += 1
        self.observe(Outcome(request_id, draft.cut(num_known), num_hits, ()))

    def expected(self, request_id: str, draft: Draft) -> float:
        """How many of a draft's tokens will be accepted, in the mean."""
        return sum(self.gains(request_id, draft))

    def gains(self, request_id: str, draft: Draft) -> list[float]:
        """Probability that each draft token is accepted, all before it included; falling.

        The list ends before the first token that is less likely than ``LEAST_LIKELY``.
        """
        rates = self._rates_of(request_id, draft).rates
        record = self._requests.get(request_id, _NO_RECORDS).get(draft.source)
        factor = 1.0 if record is None else record.factor
        gains = []
        gain = 1.0
        for index in range(len(draft.tokens)):
            chance = factor * rates[index if index < POSITION_BUCKETS else -1]
            gain *= chance if chance < _MOST_LIKELY else _MOST_LIKELY
            if gain < LEAST_LIKELY:
                break
            gains.append(gain)
        return gains

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops the factors of these requests; the shared rates keep what they taught."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._tenants.pop(request_id, None)

    def _rates_of(self, request_id: str, draft: Draft) -> _Rates:
        key = (self._tenants.get(request_id, ""), draft.source)
        buckets = self._shared.get(key)
        if buckets is None:
            buckets = [_Rates(match_len) for match_len in range(MATCH_BUCKETS)]
            self._shared[key] = buckets
        return buckets[min(draft.match_len, MATCH_BUCKETS - 1)]


_NO_RECORDS: dict[str, _Record] = {}


class _Rates:
    """The shared rates of one match length, by position.

    Before any trial a longer match is the likelier one, and later positions are likelier than the
    first: a draft that was right once tends to stay right.
    """

    __slots__ = ("_hits", "_trials", "rates")

    def __init__(self, match_len: int) -> None:
        first = min(0.3 + 0.1 * max(match_len - 2, 0), 0.7)
        self.rates = [first] + [0.7] * (POSITION_BUCKETS - 1)
        self._hits = [_PRIOR_TRIALS * rate for rate in self.rates]
        self._trials = [_PRIOR_TRIALS] * POSITION_BUCKETS

    def add(self, position: int, hit: bool) -> None:
        self._trials[position] += 1
        self._hits[position] += hit
        self.rates[position] = self._hits[position] / self._trials[position]
        if self._trials[position] > _MOST_TRIALS:
            self._trials[position] /= 2
            self._hits[position] /= 2


class _Record:
    """One source's recent drafts for a request: what was accepted, what the rates expected."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = _REQUEST_PRIOR
        self._expected = _REQUEST_PRIOR

    def add(self, rate: float, hit: bool) -> None:
        # What is forgotten of the past is filled up with the prior, which says: as all others.
        kept, rest = _REQUEST_MEMORY, (1 - _REQUEST_MEMORY) * _REQUEST_PRIOR
        self._accepted = kept * self._accepted + rest + hit
        self._expected = kept * self._expected + rest + rate

    @property
    def factor(self) -> float:
        return self._accepted / self._expected
