"""How likely each token of a draft is to be accepted, by what was accepted of its source before.

A source that says how sure it is of each token (the trie's path probabilities, a model's own
probabilities) is taken at its word only as far as it was right before: its tokens are judged by
what became of others of which it was as sure, in drafts of about the same length that rest on about
as long a match. A long draft of which all is sure may come from a text that was seen once. Other
drafts are judged by their match's length; so is one that is not there yet, where the question is
whether to ask for it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import repeat

from specserve.core.config import MAX_DRAFT_TOKENS
from specserve.core.types import Draft

BUCKETS = 9
"""Match lengths 0 .. 7 and longer; or how sure a source is, in steps that become smaller towards 1,
where a little more makes a draft many tokens longer."""

POSITION_BUCKETS = 8
"""Draft positions 1 .. 7 and later, of sources that do not say how sure they are."""

LEAST_LIKELY = 0.01
"""Tokens below this chance are never drafted: not even an idle GPU verifies for nothing."""

_MOST_LIKELY = 0.97
_PRIOR_TRIALS = 4.0
_MOST_TRIALS = 1024.0
_RECORD_PRIOR = 4.0
_RECORD_MEMORY = 0.97
_MOST_SAID = 1024


class Acceptance:
    """Estimates ``P(token j accepted | tokens before j accepted)``.

    Shared by a tenant's requests: one rate for each source, bucket and position, from decayed
    counts; what is accepted of one tenant's drafts does not change another's. What is not known of
    a rate is taken from what its source was worth altogether (empirical Bayes). Each request moves
    a source's rates by one factor: the tokens that it accepted over the tokens that the shared
    rates expected of that source's recent drafts.
    """

    def __init__(self) -> None:
        self._shared: dict[tuple[str, _View], _Shared] = {}
        self._tenants: dict[str, str] = {}
        self._requests: dict[str, dict[_View, _Record]] = {}
        # Of `gains` since the last lesson; a draft's id is its own while the draft is kept here.
        self._said: dict[tuple[str, int], tuple[Draft, list[float]]] = {}

    def assign(self, request_id: str, tenant: str) -> None:
        """Says whose request it is; one of which nothing was said is nobody's."""
        self._said.clear()
        self._tenants[request_id] = tenant

    def observe(self, request_id: str, draft: Draft, new_tokens: Sequence[int]) -> None:
        """Counts a draft that was made, by what the target wrote, whether it was sent or not.

        Its tokens count as far as the target's text is known: what agrees was accepted, or would
        have been. For a sampled text this is so with the right probability, too.

        Args:
            request_id: whose it was.
            draft: as its source made it.
            new_tokens: what the target wrote in the step after.
        """
        self._said.clear()
        num_known = min(len(draft.tokens), len(new_tokens))
        num_hits = 0
        while num_hits < num_known and draft.tokens[num_hits] == new_tokens[num_hits]:
            num_hits += 1
        self._count(request_id, draft, num_hits, num_known)
        if draft.chances and not draft.match_len:
            # A model's: whether to ask for the next is decided before any chances are known.
            blind = Draft(draft.tokens, draft.source)
            self._count(request_id, blind, num_hits, num_known)

    def expected(self, request_id: str, draft: Draft) -> float:
        """How many of a draft's tokens will be accepted, in the mean."""
        return sum(self.gains(request_id, draft))

    def gains(self, request_id: str, draft: Draft) -> list[float]:
        """Probability that each draft token is accepted, all before it included; falling.

        The list ends before the first token that is less likely than ``LEAST_LIKELY``. It is not to
        be changed: who asks again about the same draft gets the same one.
        """
        said = self._said.get((request_id, id(draft)))
        if said is None:
            if len(self._said) >= _MOST_SAID:
                self._said.clear()
            said = draft, self._gains(request_id, draft)
            self._said[request_id, id(draft)] = said
        return said[1]

    def _gains(self, request_id: str, draft: Draft) -> list[float]:
        record = self._requests.get(request_id, _NO_RECORDS).get(_view(draft))
        factor = 1.0 if record is None else record.factor
        gains = []
        gain = 1.0
        shared = self._shared_of(request_id, draft)
        for cell in _cells(shared, draft):
            chance = factor * shared.chance(cell)
            gain *= chance if chance < _MOST_LIKELY else _MOST_LIKELY
            if gain < LEAST_LIKELY:
                break
            gains.append(gain)
        return gains

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops the factors of these requests; the shared rates keep what they taught."""
        self._said.clear()
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._tenants.pop(request_id, None)

    def _count(self, request_id: str, draft: Draft, num_hits: int, num_known: int) -> None:
        num_tried = min(num_hits + 1, num_known)
        records, view = self._requests.setdefault(request_id, {}), _view(draft)
        record = records.get(view)
        if record is None:
            record = records[view] = _Record()
        shared = self._shared_of(request_id, draft)
        for index, cell in zip(range(num_tried), _cells(shared, draft), strict=False):
            rates, position = cell
            hit = index < num_hits
            record.add(shared.chance(cell), hit)
            shared.record(position).add(rates.priors[position], hit)
            rates.add(position, hit)
        shared.known.clear()

    def _shared_of(self, request_id: str, draft: Draft) -> _Shared:
        key = self._tenants.get(request_id, ""), _view(draft)
        shared = self._shared.get(key)
        if shared is None:
            if draft.chances:
                shared = _Shared(_SURE_CHANCES, _NUM_SORTS, _NUM_SORTS)
            else:
                shared = _Shared(_MATCH_CHANCES, 1, POSITION_BUCKETS - 1)
            self._shared[key] = shared
        return shared


_View = tuple[str, bool]
"""A source, and whether it said how sure it was."""

_POSITIONS = (*range(POSITION_BUCKETS), *[POSITION_BUCKETS - 1] * MAX_DRAFT_TOKENS)

_LENGTHS, _MATCHES = (3, 6, 11), (4, 8, 16)
_NUM_SORTS = (len(_LENGTHS) + 1) * (len(_MATCHES) + 1)
_SORTED_POSITIONS = [(sort, *[_NUM_SORTS + sort] * MAX_DRAFT_TOKENS) for sort in range(_NUM_SORTS)]
"""For each sort of draft the place of its first token and of all later ones."""

_LATER_CHANCE = 0.7
_MATCH_CHANCES = [
    (min(0.3 + 0.1 * max(match_len - 2, 0), 0.7), _LATER_CHANCE) for match_len in range(BUCKETS)
]
"""Of the first and of each later token, before any trial: a longer match is the likelier one, and a
draft that was right once tends to stay right."""

_SURE_CHANCES = [(((bucket + 0.5) / BUCKETS) ** 0.5,) * 2 for bucket in range(BUCKETS)]
"""The same where the source says how sure it is: it is believed."""

_NO_RECORDS: dict[_View, _Record] = {}


def _view(draft: Draft) -> _View:
    return draft.source, bool(draft.chances)


class _Rates:
    """The shared rates of one bucket, by position.

    Args:
        first: before any trial, of a first token.
        later: the same of each further one.
        num_first: positions of first tokens.
        num_later: of further ones.

    Attributes:
        priors: the rates before any trial.
    """

    __slots__ = ("_hits", "_trials", "priors")

    def __init__(self, first: float, later: float, num_first: int, num_later: int) -> None:
        self.priors = (*[first] * num_first, *[later] * num_later)
        self._hits = [0.0] * len(self.priors)
        self._trials = [0.0] * len(self.priors)

    def rate(self, position: int, worth: float) -> float:
        """By the trials, and by a source that is worth so many times what was thought of it."""
        expected = _PRIOR_TRIALS * worth * self.priors[position]
        return (self._hits[position] + expected) / (self._trials[position] + _PRIOR_TRIALS)

    def add(self, position: int, hit: bool) -> None:
        self._trials[position] += 1
        self._hits[position] += hit
        if self._trials[position] > _MOST_TRIALS:
            self._trials[position] /= 2
            self._hits[position] /= 2


class _Shared:
    """What is known of a source.

    Args:
        chances: of each bucket before any trial, of a first token and of later ones.
        num_first: positions of first tokens.
        num_later: of later ones.

    Attributes:
        buckets: the rates.
        known: chances that were asked for since it last learned.
    """

    __slots__ = ("_num_first", "_records", "buckets", "known")

    def __init__(
        self, chances: Sequence[tuple[float, float]], num_first: int, num_later: int
    ) -> None:
        self.buckets = [_Rates(*each, num_first, num_later) for each in chances]
        self.known: dict[tuple[_Rates, int], float] = {}
        self._num_first = num_first
        self._records = _Record(), _Record()

    def record(self, position: int) -> _Record:
        """What was accepted by what was thought before any trial, of first or of later tokens."""
        return self._records[position >= self._num_first]

    def chance(self, cell: tuple[_Rates, int]) -> float:
        """That a token is accepted, of this bucket and position."""
        chance = self.known.get(cell)
        if chance is None:
            rates, position = cell
            chance = rates.rate(position, self.record(position).factor)
            self.known[cell] = chance
        return chance


def _cells(shared: _Shared, draft: Draft) -> Iterable[tuple[_Rates, int]]:
    """The rates of each of a draft's tokens, and its position in them."""
    buckets = shared.buckets
    if draft.chances:
        found = (buckets[min(int(BUCKETS * each * each), BUCKETS - 1)] for each in draft.chances)
        sort = bisect(_LENGTHS, len(draft.tokens)) * (len(_MATCHES) + 1)
        sort += bisect(_MATCHES, draft.match_len)
        return zip(found, _SORTED_POSITIONS[sort], strict=False)
    bucket = buckets[min(draft.match_len, BUCKETS - 1)]
    return zip(repeat(bucket, len(draft.tokens)), _POSITIONS, strict=False)


class _Record:
    """A source's recent drafts: what was accepted, what was expected."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = _RECORD_PRIOR
        self._expected = _RECORD_PRIOR

    def add(self, rate: float, hit: bool) -> None:
        # What is forgotten of the past is filled up with the prior, which says: as expected.
        kept, rest = _RECORD_MEMORY, (1 - _RECORD_MEMORY) * _RECORD_PRIOR
        self._accepted = kept * self._accepted + rest + hit
        self._expected = kept * self._expected + rest + rate

    @property
    def factor(self) -> float:
        return self._accepted / self._expected
