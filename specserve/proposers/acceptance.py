"""How likely each token of a draft is to be accepted, by what was accepted of its source before.

A source that says how sure it is of each token (the trie's path probabilities, a model's own
probabilities) is taken at its word only as far as it was right before: its tokens are judged by
what became of others of which it was as sure, in drafts of about the same length that rest on about
as long a match. A long draft of which all is sure may come from a text that was seen once. Other
drafts are judged by their match's length; so is one that is not there yet, where the question is
whether to ask for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Sequence

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


def num_right(draft: Draft, new_tokens: Sequence[int]) -> int:
    """How many of a draft's first tokens the target wrote."""
    pairs = enumerate(zip(draft.tokens, new_tokens, strict=False))
    differ = (i for i, (drafted, written) in pairs if drafted != written)
    return next(differ, min(len(draft.tokens), len(new_tokens)))


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
        # What `prefix_probabilities` answered since the last observation; a draft is kept with its
        # answer, so that its id stays its own.
        self._said: dict[tuple[str, int], tuple[Draft, list[float]]] = {}
        self._have_learned: set[_Shared] = set()

    def assign(self, request_id: str, tenant: str) -> None:
        """Says whose request it is; one of which nothing was said is nobody's."""
        self._said.clear()
        self._tenants[request_id] = tenant

    def begin_step(self) -> None:
        """What is observed from here on is compared with what is known now."""
        for shared in self._have_learned:
            shared.refresh()
        self._have_learned.clear()
        self._said.clear()

    def observe(self, request_id: str, draft: Draft, new_tokens: Sequence[int]) -> None:
        """Counts a draft that was made, by what the target wrote, whether it was sent or not.

        Its tokens count as far as the target's text is known: what agrees was accepted, or would
        have been. For a sampled text this is so with the right probability, too.

        Args:
            request_id: whose it was.
            draft: as its source made it.
            new_tokens: what the target wrote in the step after.
        """
        num_known = min(len(draft.tokens), len(new_tokens))
        if not num_known:
            return
        num_hits = num_right(draft, new_tokens)
        self._count(request_id, draft, num_hits, num_known)
        if draft.chances and not draft.match_len:
            # A model's: whether to ask for the next is decided before any chances are known.
            blind = Draft(draft.tokens, draft.source)
            self._count(request_id, blind, num_hits, num_known)

    def expected(self, request_id: str, draft: Draft) -> float:
        """How many of a draft's tokens will be accepted, in the mean."""
        return sum(self.prefix_probabilities(request_id, draft))

    def prefix_probabilities(self, request_id: str, draft: Draft) -> list[float]:
        """Probability that each draft token is accepted, all before it included; falling.

        The list ends before the first token that is less likely than ``LEAST_LIKELY``. It is not to
        be changed: who asks again about the same draft gets the same one.
        """
        if self._have_learned or len(self._said) >= _MOST_SAID:
            self.begin_step()
        said = self._said.get((request_id, id(draft)))
        if said is None:
            said = draft, self._prefix_probabilities(request_id, draft)
            self._said[request_id, id(draft)] = said
        return said[1]

    def _prefix_probabilities(self, request_id: str, draft: Draft) -> list[float]:
        record = self._requests.get(request_id, _NO_RECORDS).get(_view(draft))
        factor = 1.0 if record is None else record.factor
        gains = []
        gain = 1.0
        shared = self._shared_of(request_id, draft)
        for chance in shared.chances(shared.cells(draft, len(draft.tokens))):
            own = factor * chance
            gain *= own if own < _MOST_LIKELY else _MOST_LIKELY
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
        records, view = self._requests.setdefault(request_id, {}), _view(draft)
        record = records.get(view)
        if record is None:
            record = records[view] = _Record()
        shared = self._shared_of(request_id, draft)
        cells = shared.cells(draft, min(num_hits + 1, num_known))
        record.add(shared.chances(cells), num_hits)
        shared.add(cells, num_hits)
        self._have_learned.add(shared)

    def _shared_of(self, request_id: str, draft: Draft) -> _Shared:
        key = self._tenants.get(request_id, ""), _view(draft)
        shared = self._shared.get(key)
        if shared is None:
            shared = _ConfidenceTable() if draft.chances else _PositionTable()
            self._shared[key] = shared
        return shared


_View = tuple[str, bool]
"""A source, and whether it said how sure it was."""

_LENGTHS, _MATCHES = (3, 6, 11), (4, 8, 16)
_NUM_SORTS = (len(_LENGTHS) + 1) * (len(_MATCHES) + 1)

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


class _Record:
    """A source's recent drafts: what was accepted, what was expected."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = _RECORD_PRIOR
        self._expected = _RECORD_PRIOR

    def add(self, chances: Sequence[float], num_hits: int) -> None:
        """Tokens of one draft with what was expected of each, of which the first were hits."""
        # What is forgotten of the past is filled up with the prior, which says: as expected.
        kept, rest = _RECORD_MEMORY, (1 - _RECORD_MEMORY) * _RECORD_PRIOR
        accepted, expected = self._accepted, self._expected
        for index, chance in enumerate(chances):
            accepted = kept * accepted + rest + (index < num_hits)
            expected = kept * expected + rest + chance
        self._accepted, self._expected = accepted, expected

    @property
    def factor(self) -> float:
        """How many times what was expected."""
        return self._accepted / self._expected


class _Shared(ABC):
    """What is known of a source: a rate for each cell, one for a bucket and position.

    A chance that was asked for is the same until :meth:`refresh`: a step's drafts are judged by
    what was known before it.

    Args:
        chances: of each bucket before any trial, of a first token and of later ones.
        num_first: positions of first tokens.
        num_later: of later ones.
    """

    def __init__(
        self, chances: Sequence[tuple[float, float]], num_first: int, num_later: int
    ) -> None:
        self._priors = [
            chance
            for first, later in chances
            for chance in (*[first] * num_first, *[later] * num_later)
        ]
        self._hits = [0.0] * len(self._priors)
        self._trials = [0.0] * len(self._priors)
        self._of_first, self._of_later = _Record(), _Record()
        self._known: dict[int, float] = {}

    @abstractmethod
    def cells(self, draft: Draft, num_tokens: int) -> list[int]:
        """Of each of the first tokens of a draft."""

    def refresh(self) -> None:
        """Chances are to be by all that was learned."""
        self._known.clear()

    def chances(self, cells: Sequence[int]) -> list[float]:
        """That a draft's tokens are accepted, each if those before it were."""
        known, found, worth = self._known, [], self._of_first
        for cell in cells:
            chance = known.get(cell)
            if chance is None:
                # By the trials, and by a source that is worth so many times what was thought of it.
                expected = _PRIOR_TRIALS * worth.factor * self._priors[cell]
                chance = (self._hits[cell] + expected) / (self._trials[cell] + _PRIOR_TRIALS)
                known[cell] = chance
            found.append(chance)
            worth = self._of_later
        return found

    def add(self, cells: Sequence[int], num_hits: int) -> None:
        """Tokens of one draft that were tried, of which the first ``num_hits`` were accepted."""
        priors = [self._priors[cell] for cell in cells]
        self._of_first.add(priors[:1], num_hits)
        self._of_later.add(priors[1:], num_hits - 1)
        hits, trials = self._hits, self._trials
        for index, cell in enumerate(cells):
            trials[cell] += 1
            hits[cell] += index < num_hits
            if trials[cell] > _MOST_TRIALS:
                trials[cell] /= 2
                hits[cell] /= 2


class _ConfidenceTable(_Shared):
    """Of drafts whose source said how sure it is: by that, and by the draft's sort."""

    def __init__(self) -> None:
        super().__init__(_SURE_CHANCES, _NUM_SORTS, _NUM_SORTS)

    def cells(self, draft: Draft, num_tokens: int) -> list[int]:
        sort = bisect(_LENGTHS, len(draft.tokens)) * (len(_MATCHES) + 1)
        sort += bisect(_MATCHES, draft.match_len)
        later, most = _NUM_SORTS + sort, BUCKETS - 1
        buckets = [int(BUCKETS * chance * chance) for chance in draft.chances[:num_tokens]]
        cells = [2 * _NUM_SORTS * (each if each < most else most) + later for each in buckets]
        cells[0] -= _NUM_SORTS
        return cells


class _PositionTable(_Shared):
    """Of other drafts: by the match's length, and by the token's position."""

    def __init__(self) -> None:
        super().__init__(_MATCH_CHANCES, 1, POSITION_BUCKETS - 1)

    def cells(self, draft: Draft, num_tokens: int) -> list[int]:
        begin = POSITION_BUCKETS * min(draft.match_len, BUCKETS - 1)
        last, end = begin + POSITION_BUCKETS, begin + num_tokens
        return [*range(begin, min(end, last)), *[last - 1] * (end - last)]
